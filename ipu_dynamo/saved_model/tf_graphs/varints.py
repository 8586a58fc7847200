"""Read integers of variable length: seven bits a byte, the lowest first."""


def read_varint(content: bytes, at: int, source: str) -> tuple[int, int]:
    """The integer at a position, and the position after it.

    Raises:
        ValueError: it does not end, or has more than 64 bits.
    """
    value = shift = 0
    while at < len(content) and shift < 64:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"{source}: offset {at}: damaged: an integer without an end")

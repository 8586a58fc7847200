"""Split `key=value;key=value` where neither quotes nor brackets are open."""

_OPEN = {"(": ")", "[": "]", "{": "}"}


def split_pairs(text: str, option: str) -> dict[str, str]:
    """The values by their keys.

    Raises:
        ValueError: a part is no pair, or a key is there twice.
    """
    pairs: dict[str, str] = {}
    for part in _split(text):
        if not part.strip():
            continue
        key, mark, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not mark or not key or not value:
            raise ValueError(f"{option}: {part.strip()[:80]!r} is not key=value")
        if key in pairs:
            raise ValueError(f"{option}: the key {key!r} is there twice")
        pairs[key] = value
    return pairs


def _split(text: str) -> list[str]:
    parts, start, closing, quote = [], 0, [], ""
    skip = False
    for index, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _OPEN:
            closing.append(_OPEN[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == ";" and not closing:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]

"""Compute every byte of an archive except the content of its members.

An archive is a zip file that other tools can open. Members are stored in the order of their list,
each at a multiple of 64 bytes, with one fixed time and sizes of 64 bits. So the other bytes follow
from names, sizes and checksums, and a reader compares all of them.
Source: PKWARE, APPNOTE.TXT 6.3, sections 4.3 and 4.5.3.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_VERSION = 45  # that knows sizes of 64 bits
_UNIX = 3 << 8  # who made it
_DATE = 1 << 5 | 1  # 1980-01-01, the first that there is
_MODE = 0o100644 << 16
_ALL_ONES = 0xFFFFFFFF  # the size is in the extra field
_SIZES, _PADDING = 0x0001, 0xD935  # kinds of extra fields
_LONGEST_NAME = 0xFF


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A member of an archive, and its checksum as zip files have it."""

    name: str
    size: int
    crc: int = 0

    def __post_init__(self) -> None:
        if not (self.name.isascii() and 0 < len(self.name) <= _LONGEST_NAME):
            raise ValueError(f"not a name of a member: {self.name!r}")


def first_data(name: str) -> int:
    """Where the content of the first member begins."""
    return _aligned(_LOCAL.size + len(name) + 24)


def first_size(header: bytes, name: str) -> int | None:
    """The size of the first member, read from the bytes before it; None where it has another name
    or form."""
    if len(header) < first_data(name):
        return None
    at = _LOCAL.size + len(name)
    kind, length, size, same = struct.unpack_from("<HHQQ", header, at)
    expected = local_header(ZipMember(name, size, _LOCAL.unpack_from(header)[6]), 0)
    fits = (kind, length, size) == (_SIZES, 16, same) and header.startswith(expected)
    return size if fits else None


def places(members: Sequence[ZipMember]) -> list[int]:
    """Where the content of each member begins."""
    begins, position = [], 0
    for member in members:
        begin = _aligned(position + _LOCAL.size + len(member.name) + 24)
        begins.append(begin)
        position = begin + member.size
    return begins


def around(members: Sequence[ZipMember]) -> Iterator[tuple[int, bytes]]:
    """Every byte that is not in a member: pieces, each with its position."""
    begins = places(members)
    position, central = 0, []
    for member, begin in zip(members, begins, strict=True):
        header = local_header(member, position)
        yield position, header
        central.append(_central_header(member, position))
        position = begin + member.size
    directory = b"".join(central)
    yield position, directory + _end(len(members), len(directory), position)


def local_header(member: ZipMember, position: int) -> bytes:
    """The bytes before a member's content, if the member begins at `position`."""
    name = member.name.encode("ascii")
    begin = _aligned(position + _LOCAL.size + len(name) + 24)
    padding = begin - (position + _LOCAL.size + len(name) + 24)
    extra = struct.pack("<HHQQ", _SIZES, 16, member.size, member.size)
    extra += struct.pack("<HH", _PADDING, padding) + bytes(padding)
    fixed = _LOCAL.pack(
        0x04034B50, _VERSION, 0, 0, 0, _DATE, member.crc, _ALL_ONES, _ALL_ONES, len(name),
        len(extra),
    )  # fmt: skip
    return fixed + name + extra


def _central_header(member: ZipMember, position: int) -> bytes:
    name = member.name.encode("ascii")
    extra = struct.pack("<HHQQQ", _SIZES, 24, member.size, member.size, position)
    fixed = _CENTRAL.pack(
        0x02014B50, _VERSION | _UNIX, _VERSION, 0, 0, 0, _DATE, member.crc, _ALL_ONES, _ALL_ONES,
        len(name), len(extra), 0, 0, 0, _MODE, _ALL_ONES,
    )  # fmt: skip
    return fixed + name + extra


def _end(count: int, size: int, position: int) -> bytes:
    """The bytes after the central directory."""
    end = _END64.pack(
        0x06064B50, _END64.size - 12, _VERSION | _UNIX, _VERSION, 0, 0, count, count, size, position
    )
    locator = _LOCATOR.pack(0x07064B50, 0, position + size, 1)
    return end + locator + _END.pack(0x06054B50, 0, 0, 0xFFFF, 0xFFFF, _ALL_ONES, _ALL_ONES, 0)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT

"""Find the members of a zip file in its bytes, and check all positions and sizes.

A member is stored uncompressed, has its checksum, is inside the file, overlaps with no other, and
its name leads to no other folder. Source: PKWARE, APPNOTE.TXT 6.3, section 4.3.
"""

import io
import struct
import zipfile
import zlib
from itertools import pairwise

from ipu_dynamo.saved_model.gate.refusal import Refusal, damaged

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_SIGNATURE = 0x04034B50
_ENCRYPTED = 1


class _View(io.RawIOBase):
    """Bytes in memory as a file, without a copy of them."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._content) if size is None or size < 0 else self._at + size
        piece = bytes(self._content[self._at : end])
        self._at += len(piece)
        return piece


def read_members(content: memoryview) -> dict[str, memoryview]:
    """The members of a zip file, by name, as views of its bytes.

    Raises:
        Refusal: it is no zip file, or a member is packed, damaged, or not where it should be.
    """
    try:
        with zipfile.ZipFile(_View(content)) as file:
            listed = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise damaged(f"no zip file that can be read ({error})") from error
    members: dict[str, memoryview] = {}
    ranges = []
    for info in listed:
        _check_name(info.filename)
        if info.filename in members:
            raise Refusal(f"member {info.filename!r} is there twice", trusting=False)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise Refusal(f"member {info.filename!r} is compressed; PyTorch's writer stores")
        if info.flag_bits & _ENCRYPTED:
            raise Refusal(f"member {info.filename!r} is encrypted", trusting=False)
        begin = _data_begin(content, info)
        end = begin + info.file_size
        if end > len(content):
            raise damaged(f"member {info.filename!r} ends at {end} of {len(content)} bytes")
        if zlib.crc32(content[begin:end]) != info.CRC:
            raise damaged(f"member {info.filename!r}, at offset {begin}, has another CRC-32")
        ranges.append((info.header_offset, end))
        members[info.filename] = content[begin:end]
    for (_, end), (begin, _) in pairwise(sorted(ranges)):
        if begin < end:
            raise Refusal(f"members overlap at offset {begin}", trusting=False)
    return members


def in_one_folder(members: dict[str, memoryview]) -> dict[str, memoryview]:
    """The members without the name of the folder that all of them are in.

    Raises:
        Refusal: the folder does not exist.
    """
    roots = {name.partition("/")[0] for name in members}
    if len(roots) != 1 or any("/" not in name for name in members):
        raise Refusal("its members are not in one folder; save it again with torch 2.8 or newer")
    return {name.partition("/")[2]: content for name, content in members.items()}


def _check_name(name: str) -> None:
    parts = name.split("/")
    odd = "\\" in name or ":" in name or "\0" in name or {"", ".", ".."} & set(parts)
    if odd or not name.isprintable():
        raise Refusal(f"member {name!r} has a name that leads elsewhere", trusting=False)


def _data_begin(content: memoryview, info: zipfile.ZipInfo) -> int:
    """Where the content of a member begins, by the header in front of it."""
    at = info.header_offset
    if at < 0 or at + _LOCAL.size > len(content):
        raise damaged(f"member {info.filename!r} begins at {at} of {len(content)} bytes")
    fields = _LOCAL.unpack_from(content, at)
    name_size, extra_size = fields[9], fields[10]
    name = bytes(content[at + _LOCAL.size : at + _LOCAL.size + name_size])
    if fields[0] != _SIGNATURE or name != info.filename.encode("utf-8"):
        raise damaged(f"member {info.filename!r} is not at offset {at}")
    if fields[3] != info.compress_type:
        raise damaged(f"member {info.filename!r} is packed in two ways")
    return at + _LOCAL.size + int(name_size) + int(extra_size)

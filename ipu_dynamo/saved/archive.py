"""Keep members of bytes in one file, with a list of their sizes and checksums in front.

The same members give the same bytes. A reader checks everything: the bytes around the members have
to follow from the list (`zip_bytes.py`), and each member has to have its checksum. The bytes in
the checksum are those that are used, not read a second time. Memory is allocated only for sizes
that the file really has.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from types import TracebackType
from typing import Any, Protocol, Self

from ipu_dynamo.replace_file import replacing
from ipu_dynamo.saved.checked_reader import CheckedReader, fill, opened
from ipu_dynamo.saved.json_text import expect, fields_of, read_json, write_json
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.zip_bytes import ZipMember, around, first_data, first_size, places

MANIFEST = "manifest.json"
FORMAT, FORM = "ipu_dynamo saved program", 5
OLDEST = 4  # the first form that is read; `form_4.py`
UNSIGNED = "0" * 64  # the signature, in the list that is signed
_LARGEST_MANIFEST = 1 << 24
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}(?:/[A-Za-z0-9_.-]{1,80}){0,2}", re.ASCII)
_SUM = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Streamed(Protocol):
    """A member that is not in memory as a whole."""

    size: int

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Listed:
    """A member as the list has it."""

    member: ZipMember
    sha256: str


def write_archive(
    path: str | os.PathLike[str],
    members: Mapping[str, bytes | Streamed],
    head: Mapping[str, Any],
    sign: Callable[[bytes], str] | None = None,
) -> None:
    """Write a file as a whole: readers find the old file until the new one is complete.

    Args:
        head: entries before the list, in JSON; `format` and `form` are added.
        sign: makes 64 hexadecimal digits of the list, and so of the whole file, which become the
            head's `signature`.

    Raises:
        OSError: the file cannot be written; the old one stays.
    """
    head = dict(head) if sign is None else {**head, "signature": UNSIGNED}
    names = sorted(members)
    if bad := [name for name in names if not _NAME.fullmatch(name)]:
        raise ValueError(f"not names of members: {bad}")
    listed = [Listed(ZipMember(name, _size(members[name])), "0" * 64) for name in names]
    first = ZipMember(MANIFEST, len(_manifest(head, listed, FORM)))
    begins = places([first, *(entry.member for entry in listed)])
    with replacing(path) as file:
        for index, (entry, begin) in enumerate(zip(listed, begins[1:], strict=True)):
            file.seek(begin)
            digest, crc = sha256(), 0
            for piece in _pieces(members[entry.member.name]):
                file.write(piece)
                digest.update(piece)
                crc = zlib.crc32(piece, crc)
            if file.tell() != begin + entry.member.size:
                raise ValueError(f"{entry.member.name} has not the size that it said")
            listed[index] = Listed(replace(entry.member, crc=crc), digest.hexdigest())
        manifest = _manifest(head, listed, FORM)
        if sign is not None:
            manifest = _manifest({**head, "signature": sign(manifest)}, listed, FORM)
        file.seek(begins[0])
        file.write(manifest)
        first = replace(first, crc=zlib.crc32(manifest))
        for position, header in around([first, *(entry.member for entry in listed)]):
            file.seek(position)
            file.write(header)


class Archive:
    """A file of `write_archive`, open for reading; the bytes around members are checked.

    Args:
        oldest: a file of an older form is refused.

    Attributes:
        form: of the file.
        head: the entries before the list.
        names: of the members, sorted.

    Raises:
        SavedProgramError: the file is not an archive, or was changed after it was written.
    """

    def __init__(self, path: str | os.PathLike[str], oldest: int = OLDEST) -> None:
        self.path, self._oldest = os.fspath(path), oldest
        self._file = opened(self.path)
        self._whole = os.fstat(self._file.fileno()).st_size
        try:
            self.head, self.form, listed, manifest = self._read_manifest()
            self._members = {entry.member.name: entry for entry in listed}
            self.names = tuple(self._members)
            first = ZipMember(MANIFEST, len(manifest), zlib.crc32(manifest))
            members = [first, *(entry.member for entry in listed)]
            self._begins = dict(zip(self.names, places(members)[1:], strict=True))
            self._compare(members)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def refused(self, reason: Reason, problem: str, part: str = "", hint: str = "") -> Exception:
        """The error that something in this file is wrong."""
        return SavedProgramError(reason, problem, path=self.path, part=part, hint=hint)

    def signed(self) -> bytes:
        """The list, of which `signature` in the head is to be the signature."""
        head = {**self.head, "signature": UNSIGNED}
        return _manifest(head, list(self._members.values()), self.form)

    def size(self, name: str) -> int:
        """Bytes of a member.

        Raises:
            SavedProgramError: the archive has no member of that name.
        """
        if name not in self._members:
            raise self.refused(Reason.DAMAGED, "the file has no such part", name)
        return self._members[name].member.size

    def sha256(self, name: str) -> str:
        """The checksum of a member, as the list has it; `read` and `MemberReader` compare."""
        self.size(name)
        return self._members[name].sha256

    def read(self, name: str, most: int) -> bytes:
        """All of a member that has `most` bytes at most.

        Raises:
            SavedProgramError: the member does not exist, is longer, or was changed.
        """
        if (size := self.size(name)) > most:
            raise self.refused(Reason.LIMIT, f"it has {size} bytes, of at most {most}", name)
        content = bytearray(size)
        with MemberReader(self, name) as reading:
            reading.into(memoryview(content))
        return bytes(content)

    def read_json(self, name: str, most: int) -> Any:
        """A member that is JSON, as in `read`."""
        content = self.read(name, most)
        with self.part(name):
            return read_json(content)

    def part(self, name: str) -> "RefusalContext":
        """Say of refusals within a `with` which part of this file they are about."""
        return RefusalContext(self, name)

    def at(self, position: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the file from `position` on."""
        if not fill(self._file, position, into):
            raise self.refused(Reason.DAMAGED, "it ends too early")

    def begin(self, name: str) -> int:
        """Where the content of a member begins."""
        return self._begins[name]

    def _bytes(self, position: int, size: int) -> bytes:
        content = bytearray(size)
        self.at(position, memoryview(content))
        return bytes(content)

    def _read_manifest(self) -> tuple[dict[str, Any], int, list[Listed], bytes]:
        begin = first_data(MANIFEST)
        size = first_size(self._bytes(0, min(self._whole, begin)), MANIFEST)
        if size is None:
            hint = "give a file that ipu_dynamo.save wrote; torch.load reads those of torch.save"
            raise self.refused(Reason.FOREIGN, "it does not begin as one", hint=hint)
        if size > _LARGEST_MANIFEST:
            raise self.refused(Reason.LIMIT, f"it has {size} bytes", MANIFEST)
        manifest = self._bytes(begin, size)
        with self.part(MANIFEST):
            head = expect(read_json(manifest), dict, "the list")
            if head.pop("format", None) != FORMAT:
                raise SavedProgramError(Reason.FOREIGN, "it is a list of another format")
            form = head.pop("form", None)
            if type(form) is not int or not self._oldest <= form <= FORM:
                known = f"{self._oldest} to {FORM}" if self._oldest < FORM else FORM
                problem = f"it has form {form!r}, and this version reads {known}"
                raise SavedProgramError(Reason.FORM, problem)
            listed = [
                _listed(entry) for entry in expect(head.pop("members", None), list, "members")
            ]
            names = [entry.member.name for entry in listed]
            if names != sorted(set(names)):
                raise SavedProgramError(Reason.DAMAGED, "members are not in their order")
        return head, form, listed, manifest

    def _compare(self, members: Sequence[ZipMember]) -> None:
        """Compare the bytes around the members with those that follow from the list."""
        end = 0
        for position, piece in around(members):
            end = position + len(piece)
            if end > self._whole or self._bytes(position, len(piece)) != piece:
                problem = f"what stands around its parts differs from byte {position} on"
                raise self.refused(Reason.DAMAGED, problem)
        if self._whole != end:
            raise self.refused(Reason.DAMAGED, f"it has {self._whole} bytes instead of {end}")


class MemberReader(CheckedReader):
    """Read a member from its begin to its end, and then compare its checksum."""

    def __init__(self, archive: Archive, name: str) -> None:
        size, digest = archive.size(name), archive.sha256(name)
        refused = partial(archive.refused, part=name)
        super().__init__(archive.at, archive.begin(name), size, digest, refused)


class RefusalContext:
    """Says of refusals within a `with` which part of a file they are about."""

    def __init__(self, archive: Archive, name: str) -> None:
        self._archive, self._name = archive, name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, SavedProgramError) and not error.path:
            error.path, error.part = self._archive.path, error.part or self._name


def _listed(value: Any) -> Listed:
    """A member as the list has it."""
    name, size, crc, digest = fields_of(value, "member", name=str, size=int, crc32=str, sha256=str)
    if not _NAME.fullmatch(name) or name == MANIFEST or {".", ".."} & set(name.split("/")):
        raise SavedProgramError(Reason.CONTENT, f"not a name of a member: {name!r}")
    if (
        not 0 <= size < 1 << 62
        or not re.fullmatch("[0-9a-f]{8}", crc)
        or not _SUM.fullmatch(digest)
    ):
        raise SavedProgramError(Reason.CONTENT, f"not a member: {name}")
    return Listed(ZipMember(name, size, int(crc, 16)), digest)


def _manifest(head: Mapping[str, Any], listed: Sequence[Listed], form: int) -> bytes:
    members = [
        {
            "name": entry.member.name,
            "size": entry.member.size,
            "crc32": f"{entry.member.crc:08x}",
            "sha256": entry.sha256,
        }
        for entry in listed
    ]
    return write_json({**head, "format": FORMAT, "form": form, "members": members})


def _size(content: bytes | Streamed) -> int:
    return len(content) if isinstance(content, bytes) else content.size


def _pieces(content: bytes | Streamed) -> Iterator[memoryview]:
    return iter([memoryview(content)]) if isinstance(content, bytes) else content.pieces()

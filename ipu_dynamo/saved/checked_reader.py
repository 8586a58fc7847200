"""Read bytes of a file of which size and checksum are known, and refuse others."""

import os
import stat
from collections.abc import Callable
from hashlib import sha256
from io import FileIO
from types import TracebackType
from typing import Self

from ipu_dynamo.saved.refusal import Reason, SavedProgramError

CHUNK = 1 << 22  # bytes in memory at once
Refused = Callable[[Reason, str], Exception]


class CheckedReader:
    """Read bytes from their begin to their end, and then compare their checksum.

    Nothing that was read may be used before the `with` has ended.

    Args:
        at: fills memory with the bytes from a position on.
        begin, size, sha256: of the bytes to read.
        refused: makes an error about these bytes.

    Attributes:
        left: how many bytes are still to come.
    """

    def __init__(
        self,
        at: Callable[[int, memoryview], None],
        begin: int,
        size: int,
        sha256_: str,
        refused: Refused,
    ) -> None:
        self._at, self._position, self.left = at, begin, size
        self._expected, self._digest, self._refused = sha256_, sha256(), refused

    def into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes.

        Raises:
            SavedProgramError: there are fewer.
        """
        if len(target) > self.left:
            raise self._refused(Reason.DAMAGED, "it ends too early")
        for begin in range(0, len(target), CHUNK):
            piece = target[begin : begin + CHUNK]
            self._at(self._position, piece)
            self._digest.update(piece)
            self._position += len(piece)
        self.left -= len(target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        if self.left:
            raise self._refused(Reason.DAMAGED, "it goes on too long")
        if self._digest.hexdigest() != self._expected:
            raise self._refused(Reason.DAMAGED, "its checksum differs")


class FileReader(CheckedReader):
    """Read a whole file, and then compare its checksum.

    Raises:
        SavedProgramError: the file does not exist, or has another size.
    """

    def __init__(self, path: str | os.PathLike[str], size: int, sha256_: str) -> None:
        self._path = os.fspath(path)
        self._file = opened(self._path)
        super().__init__(self._fill, 0, size, sha256_, self.refused)
        if (found := os.fstat(self._file.fileno()).st_size) != size:
            self._file.close()
            raise self.refused(Reason.DAMAGED, f"it has {found} bytes instead of {size}")

    def refused(self, reason: Reason, problem: str) -> Exception:
        """The error that something in this file is wrong."""
        return SavedProgramError(reason, problem, path=self._path)

    def _fill(self, position: int, into: memoryview) -> None:
        if not fill(self._file, position, into):
            raise self.refused(Reason.DAMAGED, "it ends too early")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()
        super().__exit__(kind, error, at)


def fill(file: FileIO, position: int, into: memoryview) -> bool:
    """Fill memory with the bytes of a file from a position on; whether there are so many."""
    file.seek(position)
    done = 0
    while done < len(into):
        if not (count := file.readinto(into[done:])):
            return False
        done += count
    return True


def opened(path: str) -> FileIO:
    """A regular file.

    Raises:
        SavedProgramError: there is none.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SavedProgramError(Reason.FOREIGN, "it is no regular file", path=path)
        return FileIO(path)
    except FileNotFoundError as error:
        raise SavedProgramError(Reason.MISSING, "nothing is there", path=path) from error
    except OSError as error:
        raise SavedProgramError(Reason.FOREIGN, f"{error.strerror}", path=path) from error

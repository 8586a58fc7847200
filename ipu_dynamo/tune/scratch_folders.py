"""Give a process folders to work in, which a later process removes if this one is killed."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_GATE = ".lock"  # held while folders appear and are looked at


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, of mode 0700, for the block. It is locked for as long as its
    process lives."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(parent / _GATE):
        folder = Path(tempfile.mkdtemp(dir=parent))
        handle = _open(folder)
        _try_lock(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` of processes that were killed."""
    if not parent.exists() or all(path.name == _GATE for path in parent.iterdir()):
        return
    with locked(parent / _GATE):
        folders = [path for path in parent.iterdir() if path.name != _GATE]
        _remove_unlocked(folders)


def _remove_unlocked(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # somebody else has removed it
            handle = _open(folder)
            try:
                if _try_lock(handle):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


if sys.platform == "win32":  # there a folder cannot be locked, and nothing is swept

    def _open(folder: Path) -> int:
        return os.open(os.devnull, os.O_RDONLY)

    def _try_lock(handle: int) -> bool:
        return False

    @contextmanager
    def locked(path: Path) -> Iterator[None]:
        yield

else:
    import fcntl

    def _open(folder: Path) -> int:
        return os.open(folder, os.O_RDONLY | os.O_CLOEXEC)

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process has it, or the file system has no locks
            return False
        return True

    @contextmanager
    def locked(path: Path) -> Iterator[None]:
        """Keep other processes out of blocks with the same file, which stays."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: nothing is swept there either
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

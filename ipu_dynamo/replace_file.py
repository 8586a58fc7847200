"""Replace a file, or add a folder, as a whole, even if the process is killed."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: files of killed processes are not removed
    fcntl = None  # type: ignore[assignment]

_MARK = ".unfinished-"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` when the block ends without an error.

    Unfinished files of killed processes next to `path` are removed: nothing locks these.

    Raises:
        OSError: it cannot be written; `path` stays as it is.
    """
    target = Path(os.path.realpath(path))
    _remove_left(target)
    file, name = _new_file(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


@contextmanager
def adding_folder(path: Path) -> Iterator[Path]:
    """A new folder, which gets the name `path` when the block ends without an error.

    Its files have to be on the disk by then. Unfinished folders of killed processes next to `path`
    are removed.

    Raises:
        OSError: it cannot be written, or `path` exists already.
    """
    for left in path.parent.glob(f"{_MARK}*"):
        with suppress(OSError), _locked_folder(left) as alone:
            if alone:
                shutil.rmtree(left)
    folder = path.with_name(f"{_MARK}{path.name}")
    folder.mkdir()
    with _locked_folder(folder):
        try:
            yield folder
            _sync_folder(folder)
            folder.rename(path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    _sync_folder(path.parent)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[bool]:
    """Try to lock a folder for the block; false if another process has locked it."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield locked(handle)
    finally:
        os.close(handle)


def _new_file(target: Path) -> tuple[BinaryIO, Path]:
    """A file next to `target` that this process has locked."""
    while True:
        name = target.with_name(f".{target.name[-150:]}{_MARK}{secrets.token_hex(8)}")
        file = name.open("x+b")  # with the mode that the user's umask says
        if locked(file) and not name.exists():  # another process removed it before the lock
            file.close()
            continue
        return file, name


def _remove_left(target: Path) -> None:
    """Remove unfinished files next to `target` whose writers have ended."""
    begin = f".{target.name[-150:]}{_MARK}"
    with suppress(OSError):
        for name in os.listdir(target.parent):
            if name.startswith(begin):
                with suppress(OSError), (target.parent / name).open("rb") as file:
                    if locked(file):
                        (target.parent / name).unlink()


def locked(file: BinaryIO | int) -> bool:
    """Try to lock a file until it is closed; false if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, AttributeError):  # also where there are no locks
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Let the new name last, where the system can say so."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

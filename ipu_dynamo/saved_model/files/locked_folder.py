"""Let one process at a time write to a folder; a killed one holds no lock."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nobody waits
    fcntl = None  # type: ignore[assignment]

_LONGEST = 300.0  # seconds: more than copying a large file takes
_PAUSE = 0.02


@contextmanager
def locked_folder(folder: Path, seconds: float = _LONGEST) -> Iterator[None]:
    """Hold `folder` as long as the block runs; if it was missing, it goes again with an error.

    Args:
        seconds: to wait for somebody else.

    Raises:
        TimeoutError: somebody else holds it for longer.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    handle = _locked(folder, time.monotonic() + seconds)
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # somebody else may have put something into it
                path.rmdir()
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _locked(folder: Path, end: float) -> int | None:
    """A handle that holds the folder; None where there are no locks."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return None
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"another process has been writing into {folder} all the time: try again when "
                    "it has ended"
                ) from None
            time.sleep(_PAUSE)
            continue
        except OSError:  # a file system without locks
            os.close(handle)
            return None
        if _is_at(handle, folder):
            return handle
        os.close(handle)  # whoever held it has removed it


def _is_at(handle: int, folder: Path) -> bool:
    try:
        there = folder.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(handle), there)

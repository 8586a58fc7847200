"""Make a folder as a whole: others find it absent or complete, also if the process is killed."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when the block ends without an error.

    Args:
        overwrite: whether a folder that is there and not empty is replaced.

    Raises:
        FileExistsError: it is there, and not an empty folder.
    """
    path = Path(os.path.abspath(path))
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is no folder")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise FileExistsError(f"{path} is there and not empty (overwrite=True replaces it)")
    missing = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    target = path.with_name(f".{path.name[-150:]}.unfinished-{mark}")
    target.mkdir()
    try:
        yield target
        if path.exists() and overwrite:
            old = path.with_name(f".{path.name[-150:]}.replaced-{mark}")
            os.rename(path, old)
            try:
                os.rename(target, path)
            except BaseException:
                os.rename(old, path)
                raise
            shutil.rmtree(old)
        else:
            _put(target, path)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        for folder in missing:
            with suppress(OSError):  # somebody else may have put something into it
                folder.rmdir()
        raise


def _put(target: Path, path: Path) -> None:
    """Let a folder be at `path`, if nothing else is there but an empty folder."""
    try:
        os.rename(target, path)
    except OSError as error:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(
                f"{path} is there and not empty: somebody has filled it meanwhile"
            ) from error
        raise

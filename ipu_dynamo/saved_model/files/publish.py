"""Let files appear, each as a whole: absent, old or complete, also if the process is killed."""

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from ipu_dynamo.replace_file import replacing
from ipu_dynamo.saved_model.files.named_errors import naming

Content = bytes | Path


def publish(files: Mapping[Path, Content], options: Mapping[Path, str] | None = None) -> None:
    """Write all files next to their final paths, then rename them in the order of the list.

    Args:
        files: content by path, or where the content is.
        options: that paths come from, for errors.

    Raises:
        OSError: one cannot be written; nothing of any is there.
    """
    folders: list[Path] = []  # that were missing
    try:
        with ExitStack() as stack:
            # the stack renames the last one first
            for path, content in reversed(list(files.items())):
                if options is not None and path in options:
                    stack.enter_context(naming(options[path]))
                if path.is_dir():
                    raise IsADirectoryError(f"{path} is a folder, and a file is to be there")
                folders += [folder for folder in path.parents if not folder.exists()]
                path.parent.mkdir(parents=True, exist_ok=True)
                target = stack.enter_context(replacing(path))
                if isinstance(content, bytes):
                    target.write(content)
                else:
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, target)
    except BaseException:
        for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # somebody else may have put something into it
                folder.rmdir()
        raise


def place_inside(folder: Path, path: Path) -> Path | None:
    """Where a path is in a folder, also by links; None: outside of it."""
    inner, outer = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return inner.relative_to(outer) if inner.is_relative_to(outer) else None

"""Decide the paths of an executable's files, and its name in the program."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ipu_dynamo.saved_model.conversion.executable.embed import Embedded
from ipu_dynamo.saved_model.conversion.executable.executable_file import (
    DESCRIPTION,
    STEM,
    SUFFIX,
    file_sum,
    write_description,
)
from ipu_dynamo.saved_model.conversion.settings.options import ExecutableConfig
from ipu_dynamo.saved_model.files.publish import Content, place_inside

OPTION = "embedded_runtime_save_config: embedded_runtime_exec_cachedir"


@dataclass(frozen=True, slots=True)
class PlacedExecutable:
    """The files of an executable.

    Attributes:
        files: their content by the paths where they are to be; none that is there already.
        path: of the executable, relative to the output folder when inside of it.
    """

    files: Mapping[Path, Content]
    path: str


def cache_folder(config: ExecutableConfig, out: Path) -> Path:
    """Where the files of an executable go; relative paths begin in the output folder."""
    return Path(os.path.normpath(out / config.embedded_runtime_exec_cachedir))


def place_executable(embedded: Embedded, cache: Path, out: Path) -> PlacedExecutable:
    """The files for a folder, as it is now; an executable of other bytes there stays.

    Raises:
        ValueError: an index cannot hold the path.
    """
    stem = STEM
    there = cache / f"{STEM}{SUFFIX}"
    if there.is_file() and file_sum(there) != embedded.digest:
        stem = f"{STEM}-{embedded.digest[:16]}"
    path = cache / f"{stem}{SUFFIX}"
    inside = place_inside(out, path)
    stored = str(path) if inside is None else inside.as_posix()
    if not stored.isprintable():
        raise ValueError(f"embedded_runtime_save_config: no index can name the path {stored!r}")
    files: dict[Path, Content] = {}
    if not path.is_file() or file_sum(path) != embedded.digest:
        files[path] = embedded.file
    description = path.with_suffix(DESCRIPTION)
    text = write_description(embedded.description, path.name)
    if not description.is_file() or description.read_bytes() != text:
        files[description] = text
    return PlacedExecutable(files, stored)

"""Write results into a folder, all or none where a file is there already."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ipu_dynamo.replace_file import replacing


def check_free(folder: Path, keys: Sequence[str], *, overwrite: bool) -> None:
    """Raise RuntimeError if a file of a result is there and stays.

    Raises:
        ValueError: two keys have one file.
    """
    paths = [_path(folder, key) for key in keys]
    if len(set(paths)) != len(paths):
        raise ValueError(f"two results would be one file: {', '.join(sorted(keys))}")
    if taken := [path for path in paths if path.exists() and not overwrite]:
        raise RuntimeError(f"{taken[0]} is there already; --overwrite replaces it")


def write_results(folder: Path, values: Mapping[str, Any]) -> None:
    """Write each result to `<folder>/<key>.npy`; each file is old or complete."""
    if not folder.exists():
        folder.mkdir(parents=True)
        print(f"{folder} is created")
    for key, value in values.items():
        with replacing(_path(folder, key)) as file:
            np.save(file, value, allow_pickle=False)


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key.replace('/', '_').replace(os.sep, '_').replace(chr(92), '_')}.npy"

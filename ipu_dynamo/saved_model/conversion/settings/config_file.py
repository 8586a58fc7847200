"""Read options of a conversion from a file, and put them under those that are given directly."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.conversion.settings.options import (
    NAMES,
    ConversionOptions,
    read_options,
)
from ipu_dynamo.saved_model.files.json_values import parse_json

_LARGEST = 1 << 26
_IGNORED = ("md5sum", "sha256")  # checksums in files that an earlier conversion wrote
SOLUTION = "solution"


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a conversion.

    Attributes:
        solution: the file's entry of that key: stages that an earlier conversion has found.
    """

    options: ConversionOptions = field(default_factory=ConversionOptions)
    solution: Any = None


def read_request(
    given: Mapping[str, Any], config_file: str | os.PathLike[str] | None = None
) -> Request:
    """Options by name: those that are given, then those of a file, then defaults.

    Args:
        given: None counts as left out.

    Raises:
        ValueError: the file cannot be read, or an option is unknown or wrong.
        TypeError: an option that is given directly is of a wrong type.
    """
    given = {name: value for name, value in given.items() if value is not None}
    read_options(given)
    values: dict[str, Any] = {}
    if config_file is not None:
        values = _read_file(Path(config_file))
    solution = values.pop(SOLUTION, None)
    if solution is not None and values.get("pipeline_cfg") is None:
        raise ValueError(f"{config_file}: {SOLUTION!r} needs 'pipeline_cfg' in the same file")
    if "pipeline_cfg" in given:
        solution = None
    return Request(read_options({**values, **given}), solution)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path}: more than {_LARGEST} bytes")
        value = parse_json(path.read_bytes().decode("utf-8"), comments=True)
    except OSError as error:
        raise ValueError(f"config_file: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a configuration is an object, not a {type(value).__name__}")
    values = {
        name: item for name, item in value.items() if item is not None and name not in _IGNORED
    }
    for name, item in values.items():
        if name == SOLUTION:
            if not isinstance(item, dict):
                raise ValueError(f"{path}: {SOLUTION!r} is no object")
            continue
        if name not in NAMES:
            raise ValueError(f"{path}: {name!r} is no option; there are {', '.join(NAMES)}")
        try:
            read_options({name: item})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
    return values

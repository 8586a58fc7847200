"""Write and read `ipu_config.json`, which says how IPUs compute a converted program.

It is not the file of that name that `IPUConfig` reads.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ipu_dynamo.options import Options
from ipu_dynamo.saved_model.conversion.settings.option_checks import choice, integer, proportion
from ipu_dynamo.saved_model.conversion.settings.options import PARTIALS, ConversionOptions
from ipu_dynamo.saved_model.files.json_values import parse_json

FILE = "ipu_config.json"
_LARGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class IpuSettings:
    """The settings of a machine for a converted program.

    Attributes:
        num_ipus: how many IPUs there are.
        matmul_amp, conv_amp: shares of an IPU's memory that products and convolutions may use for
            temporary values, for a model of an IPU's memory and cycles.
        matmul_partial_type, conv_partial_type: of partial sums of products of halves.
    """

    num_ipus: int = 1
    matmul_amp: float = 0.6
    conv_amp: float = 0.6
    matmul_partial_type: str = "float"
    conv_partial_type: str = "float"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def core_options(self) -> Options:
        """The core's options for a partition."""
        return Options.read(
            {
                "partials": self.matmul_partial_type,
                "convolution_partials": self.conv_partial_type,
                "memory_proportion": self.matmul_amp,
                "convolution_memory_proportion": self.conv_amp,
            }
        )


_NAMES = tuple(field.name for field in fields(IpuSettings))


def settings_of(options: ConversionOptions, num_ipus: int) -> IpuSettings:
    """The settings among the options of a conversion.

    Args:
        num_ipus: that it found.
    """
    values = {name: getattr(options, name) for name in _NAMES}
    return IpuSettings(**{**values, "num_ipus": num_ipus})


def checked_settings(**values: Any) -> IpuSettings:
    """Settings that users give.

    Raises:
        ValueError: one is out of range.
    """
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name == "num_ipus":
            checked[name] = integer(name, value, 1)
        elif name.endswith("_amp"):
            checked[name] = proportion(name, value)
        else:
            checked[name] = choice(name, value, PARTIALS)
    return IpuSettings(**checked)


def write_settings(settings: IpuSettings) -> bytes:
    """The content of the file."""
    return f"{json.dumps(settings.to_json(), indent=1)}\n".encode()


def read_settings(folder: Path) -> IpuSettings:
    """The settings in a folder that `convert` wrote.

    Raises:
        ValueError: the file is not there, or damaged.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            value = parse_json(file.read(_LARGEST).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if not isinstance(value, dict) or value.keys() != set(_NAMES):
        raise ValueError(f"{path}: not an object with {', '.join(_NAMES)}")
    try:
        return checked_settings(**value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

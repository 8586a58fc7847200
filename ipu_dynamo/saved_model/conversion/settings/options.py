"""Hold the options of a conversion, checked once where they enter."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ipu_dynamo.saved_model.conversion.settings.option_checks import (
    choice,
    expressions,
    flag,
    integer,
    lists_of_expressions,
    no_other_keys,
    proportion,
    text,
)
from ipu_dynamo.saved_model.conversion.settings.pipeline_config import (
    PipelineConfig,
    read_pipeline_config,
)

PRECISIONS = ("FP16", "FP32")
PARTIALS = ("float", "half")
_GELU = ("nodes", "node_as_gelu_input", "node_use_gelu_output")
_EXECUTABLE = ("embedded_runtime_exec_cachedir", "runtime_api_timeout_us")


@dataclass(frozen=True, slots=True)
class GeluReplacement:
    """Expressions of the nodes that compute GELUs, of their inputs, and of their readers."""

    nodes: tuple[str, ...]
    node_as_gelu_input: tuple[str, ...]
    node_use_gelu_output: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {key: list(getattr(self, key)) for key in _GELU}


@dataclass(frozen=True, slots=True)
class ExecutableConfig:
    """Where an embedded executable is written, and how long a step would wait for data."""

    embedded_runtime_exec_cachedir: str
    runtime_api_timeout_us: int

    def to_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _EXECUTABLE}


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of a conversion; `read_options` makes them from the user's values.

    Attributes:
        batch_size: the micro-batch; None: the program's own, or 1.
        pipeline_cfg, embedded_runtime_save_config: None without a pipeline, without an executable.
    """

    excluded_nodes: tuple[str, ...] = ()
    remove_excluded_nodes: bool = False
    no_ipu_placement: bool = False
    merge_subgraphs: bool = False
    num_ipus: int = 1
    matmul_amp: float = 0.6
    conv_amp: float = 0.6
    matmul_partial_type: str = "float"
    conv_partial_type: str = "float"
    batch_size: int | None = None
    batch_per_step: int = 0
    precision_mode: str | None = None
    precision_conversion_excluded_nodes: tuple[str, ...] = ()
    int64_to_int32_conversion: bool = False
    gelu_replacement: GeluReplacement | None = None
    manual_sharding: tuple[tuple[str, ...], ...] = ()
    pipeline_cfg: PipelineConfig | None = None
    embedded_runtime_save_config: ExecutableConfig | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of a configuration file."""
        return {field.name: _json(getattr(self, field.name)) for field in fields(self)}


NAMES = tuple(field.name for field in fields(ConversionOptions))


def read_options(values: Mapping[str, Any]) -> ConversionOptions:
    """The options that values by name describe; None counts as left out.

    Raises:
        ValueError: a name is unknown, or a value out of range.
        TypeError: a value is of another type, where the option's name is enough to see it.
    """
    no_other_keys("convert", values, NAMES)
    return ConversionOptions(
        **{name: _value(name, value) for name, value in values.items() if value is not None}
    )


def _value(name: str, value: Any) -> Any:
    match name:
        case "excluded_nodes" | "precision_conversion_excluded_nodes":
            return expressions(name, value)
        case "num_ipus" | "batch_size":
            return integer(name, value, 1)
        case "batch_per_step":
            return integer(name, value, 0, TypeError)
        case "matmul_amp" | "conv_amp":
            return proportion(name, value)
        case "matmul_partial_type" | "conv_partial_type":
            return choice(name, value, PARTIALS)
        case "precision_mode":
            return choice(name, value, PRECISIONS)
        case "manual_sharding":
            return lists_of_expressions(name, value)
        case "gelu_replacement":
            return _gelu(name, value)
        case "pipeline_cfg":
            return read_pipeline_config(value)
        case "embedded_runtime_save_config":
            return _executable(name, value)
        case _:
            return flag(name, value)


def _gelu(name: str, value: Any) -> GeluReplacement:
    if isinstance(value, Mapping) and value.keys() == {name}:
        value = value[name]  # as the published example has it
    if not isinstance(value, Mapping) or set(value) != set(_GELU):
        raise ValueError(f"{name} is no object with the keys {', '.join(_GELU)}")
    lists = {
        key: expressions(f"{name}: {key}", value[key], ValueError, "is no list") for key in _GELU
    }
    return GeluReplacement(**lists)


def _executable(name: str, value: Any) -> ExecutableConfig:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}, not an object")
    no_other_keys(name, value, _EXECUTABLE)
    if missing := [key for key in _EXECUTABLE if key not in value]:
        raise ValueError(f"{name} needs {missing[0]!r}")
    folder, timeout = (value[key] for key in _EXECUTABLE)
    return ExecutableConfig(
        text(f"{name}: {_EXECUTABLE[0]}", folder), integer(f"{name}: {_EXECUTABLE[1]}", timeout, 1)
    )


def _json(value: Any) -> Any:
    if isinstance(value, GeluReplacement | PipelineConfig | ExecutableConfig):
        return value.to_json()
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return value

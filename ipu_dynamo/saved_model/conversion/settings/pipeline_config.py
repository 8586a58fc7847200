"""Hold the checked value of `pipeline_cfg`, and of a solution that a conversion has kept."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ipu_dynamo.saved_model.conversion.settings.option_checks import (
    choice,
    flag,
    integer,
    is_list,
    lists_of_expressions,
    no_other_keys,
    text,
)

NAME = "pipeline_cfg"
_COMMON = ("converter", "ipu_model", "profiling_root_dir")
KEYS: Mapping[str, tuple[str, ...]] = {
    "auto": (
        *_COMMON, "solution_dir", "fine_tune_iter", "priority",
        "min_ipu_quantity", "max_ipu_quantity",
    ),
    "load": (*_COMMON, "solution_path", "profiling_enable"),
    "manual": (
        *_COMMON, "solution_dir", "profiling_enable", "manual_pipeline_config", "device_info",
    ),
}  # fmt: skip
_NEEDED = {"auto": (), "load": ("solution_path",), "manual": KEYS["manual"][-2:]}


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """How stages are found, with the defaults of its converter.

    Attributes:
        converter: `auto`, `load` or `manual`; each uses only some of the fields after
            `profiling_root_dir`.
        ipu_model: costs are the machine model's, or its estimate; else they are measured here.
        manual_pipeline_config: expressions of each stage.
        device_info: the IPU of each stage.
    """

    converter: str
    ipu_model: bool = True
    profiling_root_dir: str = "./pipeline-profiling"
    solution_dir: str = "solution"
    fine_tune_iter: int = 5
    priority: str = "cycle"
    min_ipu_quantity: int = 2
    max_ipu_quantity: int = 64
    solution_path: str = ""
    profiling_enable: bool = False
    manual_pipeline_config: tuple[tuple[str, ...], ...] = ()
    device_info: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What `read_pipeline_config` reads."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        value["manual_pipeline_config"] = [list(stage) for stage in self.manual_pipeline_config]
        value["device_info"] = list(self.device_info)
        return {key: value[key] for key in KEYS[self.converter]}


def read_pipeline_config(value: Any) -> PipelineConfig:
    """The configuration that an object describes.

    Raises:
        TypeError: it is no object, or its stages are no lists of texts.
        ValueError: a key is missing, unknown or of the wrong type, or out of range.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{NAME} is a {type(value).__name__}, not an object")
    converter = value.get("converter")
    if not isinstance(converter, str) or converter.lower() not in KEYS:
        raise ValueError(f"{NAME}: converter is {converter!r}; choose auto, load or manual")
    converter = converter.lower()
    no_other_keys(f"{NAME} with converter {converter!r}", value, KEYS[converter])
    if missing := [key for key in _NEEDED[converter] if key not in value]:
        raise ValueError(f"{NAME} with converter {converter!r} needs {missing[0]!r}")
    checked: dict[str, Any] = {"converter": converter, "profiling_enable": converter == "manual"}
    for key, item in value.items():
        if key != "converter":
            checked[key] = _value(key, item)
    config = PipelineConfig(**checked)
    if config.max_ipu_quantity < config.min_ipu_quantity:
        raise ValueError(
            f"{NAME}: max_ipu_quantity {config.max_ipu_quantity} is less than min_ipu_quantity "
            f"{config.min_ipu_quantity}"
        )
    stages, ipus = len(config.manual_pipeline_config), len(config.device_info)
    if stages != ipus:
        raise ValueError(
            f"{NAME}: manual_pipeline_config has {stages} stages, and device_info {ipus} IPUs"
        )
    if converter == "manual" and not stages:
        raise ValueError(f"{NAME}: manual_pipeline_config has no stages")
    return config


def _value(key: str, value: Any) -> Any:
    name = f"{NAME}: {key}"
    match key:
        case "ipu_model" | "profiling_enable":
            return flag(name, value)
        case "fine_tune_iter":
            return integer(name, value, 0)
        case "min_ipu_quantity" | "max_ipu_quantity":
            return integer(name, value, 1)
        case "priority":
            return choice(name, value, ("cycle", "memory"))
        case "manual_pipeline_config":
            return lists_of_expressions(name, value)
        case "device_info":
            if not is_list(value):
                raise ValueError(f"{name} is {value!r}, not a list of IPUs")
            return tuple(integer(name, ipu, 0) for ipu in value)
        case _:
            return text(name, value)


@dataclass(frozen=True, slots=True)
class Solution:
    """The stage of each node, and the IPU of each stage, as a solution file has them."""

    pipeline_mapping: Mapping[str, int]
    device_mapping: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "device_mapping": list(self.device_mapping),
            "pipeline_mapping": dict(self.pipeline_mapping),
        }

"""Say in an index where the nodes of a converted program run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEYS = ("partitions", "ipu", "pipeline", "executable", "batch_size", "batch_per_step")
_DEVICES = ("host", "ipu")
LARGEST_NUMBER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PlacementEntry:
    """Where the nodes of a signature run, by canonical name.

    Attributes:
        partitions: device and nodes of each, in the order in which they run.
        ipu: the number of the IPU of the nodes on one.
        pipeline_mapping: the stage of each node; None without a pipeline.
        device_mapping: the IPU of each stage.
        executable: path of an embedded executable: in the folder, or absolute.
        batch_size: rows of a micro-batch.
        batch_per_step: micro-batches of a step, but for the stages of a pipeline.
    """

    partitions: tuple[tuple[str, tuple[str, ...]], ...]
    ipu: Mapping[str, int]
    pipeline_mapping: Mapping[str, int] | None = None
    device_mapping: tuple[int, ...] = ()
    executable: str | None = None
    batch_size: int = 1
    batch_per_step: int = 0

    @property
    def nodes(self) -> dict[str, str]:
        """The device of each node."""
        return {name: device for device, names in self.partitions for name in names}

    def to_json(self) -> dict[str, Any]:
        pipeline = None
        if self.pipeline_mapping is not None:
            pipeline = {
                "pipeline_mapping": dict(self.pipeline_mapping),
                "device_mapping": list(self.device_mapping),
            }
        return {
            "partitions": [{"device": device, "nodes": list(n)} for device, n in self.partitions],
            "ipu": dict(self.ipu),
            "pipeline": pipeline,
            "executable": self.executable,
            "batch_size": self.batch_size,
            "batch_per_step": self.batch_per_step,
        }


def placement_from_json(value: Any, what: str) -> PlacementEntry:
    """Inverse of `to_json`.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, dict) or value.keys() != set(_KEYS):
        raise ValueError(f"{what}: no object with {', '.join(_KEYS)}")
    partitions = value["partitions"]
    if not isinstance(partitions, list):
        raise ValueError(f"{what}: partitions is no list")
    executable = value["executable"]
    if not (executable is None or (isinstance(executable, str) and executable.isprintable())):
        raise ValueError(f"{what}: executable is no path")
    pipeline, mapping = value["pipeline"], None
    devices: tuple[int, ...] = ()
    if pipeline is not None:
        if not isinstance(pipeline, dict) or set(pipeline) != {
            "pipeline_mapping", "device_mapping",
        }:  # fmt: skip
            raise ValueError(f"{what}: pipeline has no pipeline_mapping and device_mapping")
        mapping = _numbers(pipeline["pipeline_mapping"], f"{what}: pipeline_mapping")
        if not isinstance(pipeline["device_mapping"], list):
            raise ValueError(f"{what}: device_mapping is no list")
        devices = tuple(_number(n, f"{what}: device_mapping") for n in pipeline["device_mapping"])
    return PlacementEntry(
        tuple(_partition(part, f"{what}: partitions[{i}]") for i, part in enumerate(partitions)),
        _numbers(value["ipu"], f"{what}: ipu"),
        mapping,
        devices,
        executable,
        _number(value["batch_size"], f"{what}: batch_size", 1),
        _number(value["batch_per_step"], f"{what}: batch_per_step"),
    )


def _partition(value: Any, what: str) -> tuple[str, tuple[str, ...]]:
    if (
        not isinstance(value, dict)
        or value.keys() != {"device", "nodes"}
        or value["device"] not in _DEVICES
        or not isinstance(value["nodes"], list)
        or not all(isinstance(name, str) for name in value["nodes"])
    ):
        raise ValueError(f"{what}: no device with its nodes")
    return value["device"], tuple(value["nodes"])


def _numbers(value: Any, what: str) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    return {name: _number(number, f"{what}: {name!r}") for name, number in value.items()}


def _number(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= LARGEST_NUMBER:
        raise ValueError(f"{what} is {value!r}, not a number from {least} on")
    return value

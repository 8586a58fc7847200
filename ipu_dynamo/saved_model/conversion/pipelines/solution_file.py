"""Read and write solution files: the stage of each node, and the IPU of each stage."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ipu_dynamo.saved_model.conversion.settings.pipeline_config import Solution
from ipu_dynamo.saved_model.files.json_values import parse_json

LARGEST = 1 << 26
_DEVICES, _MISSPELLED, _STAGES = "device_mapping", "device_maping", "pipeline_mapping"
_LEFT_OUT = -1  # the stage that the original tool writes for a node that it leaves out
_MOST = 1 << 16  # stages


def write_solution(solution: Solution) -> bytes:
    """The content of a solution file."""
    return f"{json.dumps(solution.to_json(), indent=1)}\n".encode()


def read_solution_file(
    path: Path, nodes: Collection[str], others: Collection[str], num_ipus: int
) -> Solution:
    """The solution in a file; see `read_solution`.

    Raises:
        ValueError: it cannot be read, or does not fit the program.
    """
    try:
        if not path.is_file():
            raise ValueError(f"solution_path: {path} is no file")
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path}: more than {LARGEST} bytes")
        value = parse_json(path.read_bytes().decode("utf-8"), comments=True)
    except OSError as error:
        raise ValueError(f"solution_path: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return read_solution(value, str(path), nodes, others, num_ipus)


def read_solution(
    value: Any, what: str, nodes: Collection[str], others: Collection[str], num_ipus: int
) -> Solution:
    """The solution that an object describes.

    Args:
        what: where it stands, for errors.
        nodes: those that need a stage, in the order of data.
        others: names of the program that may be there and are ignored.
        num_ipus: that there are.

    Raises:
        ValueError: a key or name is unknown or missing, or a value is invalid.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{what}: a solution is an object, not a {type(value).__name__}")
    if unknown := [key for key in value if key not in (_DEVICES, _MISSPELLED, _STAGES)]:
        raise ValueError(f"{what}: {unknown[0]!r} is no key of a solution")
    if _STAGES not in value:
        raise ValueError(f"{what}: {_STAGES!r} is missing")
    stages = _stages(value[_STAGES], f"{what}: {_STAGES}", nodes, others)
    count = max(stages.values(), default=0) + 1
    devices = _devices(value, what)
    if not devices:
        devices = list(range(count))
    if len(devices) != count:
        raise ValueError(
            f"{what}: {_DEVICES} has {len(devices)} IPUs, and there are {count} stages"
        )
    for stage, ipu in enumerate(devices):
        if ipu >= num_ipus:
            raise ValueError(
                f"{what}: {_DEVICES} puts stage {stage} on IPU {ipu}, and num_ipus is {num_ipus}"
            )
    return Solution(stages, tuple(devices))


def _devices(value: Mapping[str, Any], what: str) -> list[int]:
    keys = [key for key in (_DEVICES, _MISSPELLED) if key in value]
    given = [[] if value[key] is None else value[key] for key in keys]
    for devices in given:
        if not isinstance(devices, list) or any(type(i) is not int or i < 0 for i in devices):
            raise ValueError(f"{what}: {_DEVICES} is no list of IPUs from 0 on")
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(f"{what}: {_DEVICES!r} and {_MISSPELLED!r} are different; leave one out")
    return given[0] if given else []


def _stages(
    value: Any, what: str, nodes: Collection[str], others: Collection[str]
) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is no object")
    for name, stage in value.items():
        if type(stage) is not int or not _LEFT_OUT <= stage < _MOST:
            raise ValueError(f"{what}: node {name!r} has stage {stage!r}, which is no stage")
    names = {*nodes, *others}
    if unknown := [name for name in value if name not in names]:
        shown = ", ".join(map(repr, unknown[:5]))
        raise ValueError(f"{what}: the program has no nodes {shown} ({len(unknown)} in all)")
    missing = [name for name in nodes if value.get(name, _LEFT_OUT) == _LEFT_OUT]
    if missing:
        shown = ", ".join(map(repr, missing[:5]))
        raise ValueError(f"{what}: no stage for node {shown} ({len(missing)} in all)")
    return {name: value[name] for name in nodes}

"""Write a compiled program into a file, and a description of its interface next to it.

`application.ipu_exec` is a saved program of the core, with a list of the nodes that it was made of;
`application.json` describes it for people and for servers.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved.archive import write_archive
from ipu_dynamo.saved.json_text import write_json
from ipu_dynamo.saved_model.conversion.executable.compile_part import CompiledProgram
from ipu_dynamo.saved_model.conversion.executable.compiled_part import CompiledPart
from ipu_dynamo.saved_model.conversion.settings.ipu_config import IpuSettings
from ipu_dynamo.saved_model.files.tensor_spec import TensorSpec
from ipu_dynamo.version import __version__
from ipu_dynamo.whole_step.saving.save import contents

KIND = "saved_model"  # which part of this package writes the file
FORMAT, FORMAT_VERSION = "ipu_dynamo.executable", 1
STEM, SUFFIX, DESCRIPTION = "application", ".ipu_exec", ".json"
NODES = "nodes.json"  # member: the compiled nodes


def write_program(path: Path, compiled: CompiledProgram) -> str:
    """Write the file; the checksum that it has. The same program gives the same bytes."""
    members, head = contents(compiled.model, random_state=False)
    rows = compiled.part.micro_batch.symbol is not None
    members[NODES] = write_json(
        {"rows": rows, "stacked": compiled.stacked, "nodes": _nodes(compiled.part)}
    )
    write_archive(path, members, head | {"kind": KIND})
    return file_sum(path)


def file_sum(path: Path) -> str:
    """The checksum of a file."""
    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def described(
    compiled: CompiledProgram,
    settings: IpuSettings,
    *,
    digest: str,
    batch_per_step: int,
    runtime_api_timeout_us: int,
    pipeline: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The description next to an executable, without the name of the file.

    Args:
        digest: its checksum.
    """
    part = compiled.part
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "torch_version": torch.__version__,
        "executable": None,
        "sha256": digest,
        "inputs": _specs(part.inputs),
        "outputs": _specs(part.outputs),
        "num_ipus": settings.num_ipus,
        "matmul_amp": settings.matmul_amp,
        "conv_amp": settings.conv_amp,
        "matmul_partial_type": settings.matmul_partial_type,
        "conv_partial_type": settings.conv_partial_type,
        "batch_size": part.micro_batch.size,
        "batch_per_step": batch_per_step,
        "runtime_api_timeout_us": runtime_api_timeout_us,
        "pipeline": None if pipeline is None else dict(pipeline),
    }


def write_description(value: Mapping[str, Any], name: str) -> bytes:
    """The content of `application.json`.

    Args:
        value: of `described`.
        name: of the executable's file.
    """
    value = {**value, "executable": name}
    return f"{json.dumps(value, indent=1, allow_nan=False)}\n".encode()


def _specs(values: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: TensorSpec(
            position, str(value.dtype).removeprefix("torch."), tuple(value.shape)
        ).to_json()
        for position, (name, value) in enumerate(values.items())
    }


def _nodes(part: CompiledPart) -> list[dict[str, Any]]:
    """The compiled nodes, as `show --nodes` lists nodes."""
    result = []
    for group in part.groups():
        value = group.value.meta["val"]
        result.append(
            {
                "name": group.name,
                "fx_name": group.value.name,
                "op": group.operator,
                "kind": "op",
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "device": "ipu",
                "ipu": part.placement.ipus[group.name],
                "stage": part.placement.stages.get(group.name),
            }
        )
    return result

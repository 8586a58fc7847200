"""Let models mark inputs and outputs whose transfer is to overlap with compute.

`ipu::overlap_input` and `ipu::overlap_output` are the marks. They exist until the first pass,
`overlap_io`, reads them.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ipu_dynamo.ops.private.graphs import pytree

Overlap = Literal["no_overlap", "accumulation_loop", "device_iteration_loop"]
OVERLAPS: tuple[str, ...] = get_args(Overlap)
_library = torch.library.Library("ipu", "FRAGMENT")


def _marked(x: Tensor, mode: str) -> Tensor:
    return x.clone()


for _name in ("overlap_input", "overlap_output"):
    _library.define(f"{_name}(Tensor x, str mode) -> Tensor")
    _library.impl(_name, _marked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipu::{_name}", _marked, lib=_library)
    torch.library.register_autograd(
        f"ipu::{_name}", lambda context, gradient: (gradient, None), lib=_library
    )
overlap_input_op = torch.ops.ipu.overlap_input.default
overlap_output_op = torch.ops.ipu.overlap_output.default


def set_overlap_for_input(input_tensors: Any, mode: Overlap) -> Any:
    """Mark inputs of the model: their transfer to the IPUs overlaps with compute.

    The mark is the only operator that reads an input. It changes no value, and does nothing
    outside a program and through `torch.compile`.

    Args:
        input_tensors: a tensor, or any structure of tensors and other objects.
        mode: `no_overlap` transfers an input when it is needed; the others while the micro-batch
            before it is computed. There is no overlap for the first micro-batch of each device
            iteration (`accumulation_loop`) or of each call (`device_iteration_loop`).

    Returns:
        The same structure.

    Source: PopTorch user guide, "Overlapping host IO".
    """
    return _mark(input_tensors, mode, torch.ops.ipu.overlap_input)


def set_overlap_for_output(output_tensors: Any, mode: Overlap) -> Any:
    """Mark outputs of the model: their transfer to the host overlaps with compute.

    The model returns each marked tensor once, and nothing else reads it.

    Args:
        output_tensors: a tensor, or any structure of tensors and other objects.
        mode: `no_overlap` transfers an output when it is computed; the others while the next
            micro-batch is computed. There is no overlap for the last micro-batch of each device
            iteration (`accumulation_loop`) or of each call (`device_iteration_loop`).

    Returns:
        The same structure.

    Source: PopTorch user guide, "Overlapping host IO".
    """
    return _mark(output_tensors, mode, torch.ops.ipu.overlap_output)


def _mark(tensors: Any, mode: Overlap, mark: Any) -> Any:
    if mode not in OVERLAPS:
        raise ValueError(f"overlap mode is {mode!r}; choose one of {', '.join(OVERLAPS)}")
    if not torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
        return tensors
    return pytree.tree_map_only(Tensor, lambda tensor: mark(tensor, mode), tensors)

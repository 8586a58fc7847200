"""Offer PopTorch's operators, for use inside models."""

from typing import Any

from torch import Tensor

from ipu_dynamo.ops.marks import available_memory, markers, overlap
from ipu_dynamo.ops.marks.serialized import serialized_matmul
from ipu_dynamo.program import Overlap
from poptorch.annotations import NameScope
from poptorch.blocks import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, removeBlocks
from poptorch.cpu import CPU
from poptorch.ctc import ctc_beam_search_decoder
from poptorch.custom_ops import custom_op
from poptorch.enums import MatMulSerializationMode, OverlapMode
from poptorch.errors import createPoptorchError, require
from poptorch.ipu_print import ipu_print_tensor
from poptorch.loops import cond, for_loop
from poptorch.multi_conv import MultiConv
from poptorch.point_clouds import fps, nearest
from poptorch.slicing import dynamic_slice, dynamic_update
from poptorch.tracing import isRunningOnIpu

_OVERLAPS: dict[OverlapMode, Overlap] = {
    OverlapMode.NoOverlap: "no_overlap",
    OverlapMode.OverlapAccumulationLoop: "accumulation_loop",
    OverlapMode.OverlapDeviceIterationLoop: "device_iteration_loop",
}


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark `x` as the value that training minimises.

    Args:
        x: floating-point tensor of any shape.
        reduction: "sum", "mean", or "none", which differentiates the sum of the elements.

    Returns:
        a 0-dim tensor for "sum" and "mean", else a copy of `x`.
    """
    return markers.identity_loss(x, reduction)


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """The product of two tensors, computed in parts one after the other to save memory.

    The gradients of both are computed in parts along the same dimension. A cross-entropy that
    reads nothing but the product is computed part by part with it.

    Args:
        lhs: `[..., m, n]`.
        rhs: `[..., n, p]`.
        mode: which dimension is split: m (`InputChannels`), n (`ReducingDim`), p
            (`OutputChannels`), or none (`Disabled`).
        factor: how many parts; it divides the dimension.
        keep_precision: add up half-precision parts in float32, and round once.

    Raises:
        poptorch.Error: inside a model that is compiled, for a factor that does not divide.
    """
    require(isinstance(lhs, Tensor), f"lhs must be a tensor, got {lhs!r}")
    require(isinstance(rhs, Tensor), f"rhs must be a tensor, got {rhs!r}")
    require(isinstance(keep_precision, bool), f"keep_precision must be a bool: {keep_precision!r}")
    require(
        isinstance(mode, MatMulSerializationMode),
        f"mode must be a poptorch.MatMulSerializationMode, got {mode!r}",
    )
    require(isinstance(factor, int), f"factor must be an int, got {factor!r}")
    if isRunningOnIpu() and mode is not MatMulSerializationMode.Disabled:
        _check_factor(lhs, rhs, mode, factor)
    return serialized_matmul(lhs, rhs, mode.value, factor, keep_precision)


def _check_factor(lhs: Tensor, rhs: Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    sizes = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2:-1],
        MatMulSerializationMode.ReducingDim: lhs.shape[-1:],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1:],
    }
    for size in sizes[mode]:  # none where the tensor is no matrix, which the product refuses
        if factor < 1 or size % factor:
            raise createPoptorchError(
                f"Invalid serialisation factor {factor} for mode {mode.name}: it must be a "
                f"positive divisor of the dimension that is split, which has size {size}",
                id="operator",
            )


def nop(tensor: Tensor) -> Tensor:
    """A copy of a tensor. PopTorch keeps the operator in its program; here engines may fuse it.

    Args:
        tensor: of any shape and dtype.

    Raises:
        poptorch.Error: it is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise createPoptorchError(f"nop takes a torch.tensor, got {tensor!r}", id="operator")
    return tensor.clone()


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """The tensor itself; its operator may use so much of an IPU's memory for temporary values.

    The share is in the program's text, and changes no result.

    Args:
        tensor: the result of a matrix product, convolution or the like.
        available_memory_proportion: from 0 to 1.

    Raises:
        poptorch.Error: it is no tensor.
        ValueError: the proportion is not from 0 to 1.
    """
    if not isinstance(tensor, Tensor):
        raise createPoptorchError(
            f"set_available_memory takes a torch.tensor, got {tensor!r}", id="operator"
        )
    if not 0 <= available_memory_proportion <= 1:
        raise ValueError(
            f"available_memory_proportion must be from 0 to 1, got {available_memory_proportion}"
        )
    return available_memory.set_available_memory(tensor, available_memory_proportion)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep tensors for the backward pass, where others are computed again.

    A pipeline of several stages recomputes by default: each stage but the last keeps its inputs
    and these.

    Args:
        tensors: one tensor, several, or one list or tuple of them.

    Returns:
        The same structure: a tensor, a tuple of several, or the given list or tuple.

    Raises:
        ValueError: for anything else.
    """
    given = tensors[0] if len(tensors) == 1 else tensors
    several = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(tensor, Tensor) for tensor in several):
        raise ValueError("All inputs must be tensors")
    if isinstance(given, Tensor):
        return markers.recomputation_checkpoint(given)
    return type(given)([markers.recomputation_checkpoint(tensor) for tensor in given])


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Transfer inputs of the model while other micro-batches are computed.

    It must be the only operator that reads an input. Overlap needs
    `options.TensorLocations.numIOTiles`, output mode All or Sum, and another strategy than
    `PipelinedExecution`. No value changes.

    Args:
        input_tensors: a tensor, or any structure of tensors and other objects.
        mode: the loop within which transfers overlap.

    Returns:
        The same structure.
    """
    return overlap.set_overlap_for_input(input_tensors, _overlap_mode(mode))


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Transfer outputs of the model while other micro-batches are computed.

    The model returns the result of this function, once. The requirements are those of
    `set_overlap_for_input`.

    Args:
        output_tensors: a tensor, or any structure of tensors and other objects.
        mode: the loop within which transfers overlap.

    Returns:
        The same structure.
    """
    return overlap.set_overlap_for_output(output_tensors, _overlap_mode(mode))


def _overlap_mode(mode: OverlapMode) -> Overlap:
    require(isinstance(mode, OverlapMode), f"mode must be a poptorch.OverlapMode, got {mode!r}")
    return _OVERLAPS[mode]


__all__ = [
    "CPU",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "MultiConv",
    "NameScope",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]

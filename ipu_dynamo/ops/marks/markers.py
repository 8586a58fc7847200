"""Define the `ipu::` operators that annotate a model: blocks, the loss, values, functions.

They exist between tracing and the passes that consume them (`placement`, `identity_loss`,
`differentiate`, `anchor_gradients`, `recompute`). Outside a trace the block markers do nothing and
`identity_loss` is its reduction.
"""

import itertools
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

CustomCall = Callable[..., Sequence[Tensor]]
NO_IPU = -1  # `begin_block` without an IPU

_library = torch.library.Library("ipu", "DEF")
_library.define("begin_block(str name, int ipu) -> ()")
_library.define("end_block() -> ()")
_library.define("identity_loss(Tensor x, str reduction) -> Tensor")
_library.define("recomputation_checkpoint(Tensor x) -> ()")
_library.define("gradient(Tensor x, str name) -> Tensor")
_library.define("autograd_function(Tensor[] tensors, int handle) -> Tensor[]")


def _begin_block(name: str, ipu: int) -> None:
    """Mark the start of a block; a marker computes nothing."""


def _end_block() -> None:
    """Mark the end of a block; a marker computes nothing."""


def _identity_loss(x: Tensor, reduction: str) -> Tensor:
    if reduction == "sum":
        return x.sum()
    return x.mean() if reduction == "mean" else x.clone()


def _recomputation_checkpoint(x: Tensor) -> None:
    """Mark a value. There is no result: a model may change the marked value in place."""


def _gradient(x: Tensor, name: str) -> Tensor:
    """Mark the gradient of the value that is called `name`."""
    return x.clone()


_functions: WeakValueDictionary[int, CustomCall] = WeakValueDictionary()
_handles = itertools.count()


def _autograd_function(tensors: Sequence[Tensor], handle: int) -> Sequence[Tensor]:
    return _functions[handle](*tensors)


_library.impl("begin_block", _begin_block, "CompositeExplicitAutograd")
_library.impl("end_block", _end_block, "CompositeExplicitAutograd")
_library.impl("identity_loss", _identity_loss, "CompositeImplicitAutograd")
_library.impl("recomputation_checkpoint", _recomputation_checkpoint, "CompositeExplicitAutograd")
_library.impl("recomputation_checkpoint", _recomputation_checkpoint, "Meta")
_library.impl("gradient", _gradient, "CompositeExplicitAutograd")
_library.impl("autograd_function", _autograd_function, "CompositeImplicitAutograd")

begin_block = torch.ops.ipu.begin_block.default
end_block = torch.ops.ipu.end_block.default
identity_loss_op = torch.ops.ipu.identity_loss.default
recomputation_checkpoint_op = torch.ops.ipu.recomputation_checkpoint.default
gradient_op = torch.ops.ipu.gradient.default
autograd_function_op = torch.ops.ipu.autograd_function.default
has_side_effect(begin_block)
has_side_effect(end_block)
has_side_effect(recomputation_checkpoint_op)


def register_function(call: CustomCall) -> int:
    """Make `call` known by a handle, which graphs hold, as long as `call` is referenced."""
    handle = next(_handles)
    _functions[handle] = call
    return handle


def function_of(handle: int) -> CustomCall | None:
    """The function of a handle; None if it was deleted, as nothing refers to it."""
    return _functions.get(handle)


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark `x` as the value that training minimises.

    Args:
        x: any floating-point tensor.
        reduction: `sum`, `mean`, or `none`, which differentiates the sum of the elements.

    Returns:
        A 0-dim tensor for `sum` and `mean`, else a copy of `x`.

    Raises:
        AssertionError: for any other reduction.

    Source: PopTorch user guide, "poptorch.identity_loss".
    """
    if reduction not in ("sum", "mean", "none"):
        raise AssertionError(
            f"Unsupported reduction type! {reduction!r} is none of 'sum', 'mean' and 'none'"
        )
    marked: Tensor = torch.ops.ipu.identity_loss(x, reduction)
    return marked


def recomputation_checkpoint(x: Tensor) -> Tensor:
    """Mark `x` as a value that is kept for the backward pass where others are computed again.

    It does nothing outside a program, through `torch.compile`, and where nothing is recomputed.

    Source: PopTorch user guide, "poptorch.recomputationCheckpoint".

    Args:
        x: any tensor, which is returned.
    """
    if not torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
        return x
    torch.ops.ipu.recomputation_checkpoint(x)
    return x

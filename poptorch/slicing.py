"""Read and write windows of tensors whose start is known only when the program runs."""

from typing import Any

import torch
from torch import Tensor

from poptorch.errors import createPoptorchError
from poptorch.tracing import isRunningOnIpu


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor | int, size: int, step: int) -> Tensor:
    """Every `step`-th element of a window of a tensor; a window over the end goes on at the start.

    Outside a model that is compiled it is an ordinary slice, which ends where the tensor does.

    Args:
        tensor: of any shape and dtype.
        dim: the dimension that is sliced; a multiple of `size` long.
        start: where the window begins: an integer tensor with one element.
        size: how long the window is.
        step: from one element to the next.

    Raises:
        poptorch.Error: arguments of other types, or a size or step that cannot be.
    """
    _check(dim, start, size, {"tensor": tensor})
    if not isinstance(step, int):
        raise createPoptorchError("Step must be an integer.", id="operator")
    if step < 1:
        raise createPoptorchError(
            f"The step of a slice must be at least 1, got {step}.", id="operator"
        )
    length = tensor.shape[dim]
    if not isRunningOnIpu():
        first = int(start)
        return tensor[(slice(None),) * (dim % tensor.dim()) + (slice(first, first + size, step),)]
    if length % size:
        raise createPoptorchError(
            f"The size of the slice ({size}) must be a factor of the slicing dimension ({length}).",
            id="operator",
        )
    return tensor.index_select(dim, _window(start, size, step, length, tensor.device))


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor | int, size: int) -> Tensor:
    """A copy of a tensor in which `src` takes the place of a window.

    A window over the end goes on at the start. Outside a model that is compiled the window must
    end where the tensor does, or before.

    Args:
        input: the tensor that is copied.
        src: the window's new values; of the same rank and dtype as `input`.
        dim: the dimension that the window is part of.
        start: where it begins: an integer tensor with one element.
        size: how long it is; also the size of `src` in this dimension.

    Raises:
        poptorch.Error: arguments of other types, or a size that cannot be.
    """
    _check(dim, start, size, {"input": input, "src": src})
    if src.dim() != input.dim() or src.dtype != input.dtype:
        raise createPoptorchError(
            f"dynamic_update: src {_kind(src)} and input {_kind(input)} must have the same rank "
            "and dtype.",
            id="operator",
        )
    if src.shape[dim] != size:
        raise createPoptorchError(
            f"dynamic_update: src has size {src.shape[dim]} in dimension {dim}, not {size}.",
            id="operator",
        )
    if not isRunningOnIpu():
        return input.slice_scatter(src, dim, int(start), int(start) + size)
    length = input.shape[dim]
    if size > length:
        raise createPoptorchError(
            f"dynamic_update: the window of {size} is longer than dimension {dim} ({length}).",
            id="operator",
        )
    return input.index_copy(dim, _window(start, size, 1, length, input.device), src)


def _check(dim: Any, start: Any, size: Any, tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise createPoptorchError(
                f"{name} must be a torch.tensor, got {tensor!r}", id="operator"
            )
    for name, number in (("Dimension", dim), ("Size", size)):
        if not isinstance(number, int):
            raise createPoptorchError(f"{name} must be an integer.", id="operator")
    if isRunningOnIpu() and not isinstance(start, Tensor):
        raise createPoptorchError(f"start must be a torch.tensor, got {start!r}", id="operator")
    if isinstance(start, Tensor) and (start.numel() != 1 or start.is_floating_point()):
        raise createPoptorchError(
            f"start must be an integer tensor with one element: {_kind(start)}", id="operator"
        )
    if size == 0:
        raise createPoptorchError("The start and end of a slice must be different.", id="operator")
    if size < 0:
        raise createPoptorchError(
            "Taking a slice of a tensor with the end less than the start is not supported.",
            id="operator",
        )
    for tensor in tensors.values():
        if not -tensor.dim() <= dim < tensor.dim():
            raise createPoptorchError(f"{_kind(tensor)} has no dimension {dim}.", id="operator")


def _window(start: Any, size: int, step: int, length: int, device: torch.device) -> Tensor:
    """The indices of a window, on a ring of `length` elements."""
    steps = torch.arange(0, size, step, device=device)
    return (start.reshape(()).to(torch.int64) + steps) % length


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


__all__ = ["dynamic_slice", "dynamic_update"]

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
    _check_tensor("dynamic_slice must take a torch.tensor input", tensor)
    _check_window("dynamic_slice", tensor, dim, start, size)
    if not isinstance(step, int):
        raise createPoptorchError("Step must be an integer.", id="operator")
    if step < 1:
        raise createPoptorchError(f"Slicing step must be at least 1, got {step}.", id="operator")
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
    _check_tensor("dynamic_update must take a torch.tensor input", input)
    _check_tensor("Src argument to dynamic_update must be a torch.tensor", src)
    _check_window("dynamic_update", input, dim, start, size)
    if src.dim() != input.dim():
        raise createPoptorchError(
            "input and src tensors must have same dimensionality. "
            f"({input.dim()}) vs ({src.dim()})",
            id="operator",
        )
    if src.dtype != input.dtype:
        raise createPoptorchError(
            f"input and src tensor must have same dtype. ({input.dtype} vs {src.dtype})",
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


def _check_tensor(problem: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise createPoptorchError(f"{problem}, got {value!r}", id="operator")


def _check_window(name: str, tensor: Tensor, dim: Any, start: Any, size: Any) -> None:
    for argument, number in (("Dimension", dim), ("Size", size)):
        if not isinstance(number, int):
            raise createPoptorchError(f"{argument} must be an integer.", id="operator")
    if isRunningOnIpu():
        _check_tensor(f"Slice start argument to {name} must be a torch.tensor", start)
    if isinstance(start, Tensor) and (start.numel() != 1 or start.is_floating_point()):
        raise createPoptorchError(
            f"Expected integer typed start tensor with one element, got {_kind(start)}",
            id="operator",
        )
    if size == 0:
        raise createPoptorchError("The start and end of a slice must be different.", id="operator")
    if size < 0:
        raise createPoptorchError(
            "Taking a slice of a tensor with the end less than the start is not supported.",
            id="operator",
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise createPoptorchError(f"{_kind(tensor)} has no dimension {dim}.", id="operator")


def _window(start: Any, size: int, step: int, length: int, device: torch.device) -> Tensor:
    """The indices of a window, on a ring of `length` elements."""
    steps = torch.arange(0, size, step, device=device)
    return (start.reshape(()).to(torch.int64) + steps) % length


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


__all__ = ["dynamic_slice", "dynamic_update"]

"""Choose points of clouds: the farthest from each other, the nearest."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipu_dynamo.ops.library.points import farthest_points, nearest_points
from poptorch.errors import createPoptorchError

Batch = Sequence[int] | Tensor | None


def fps(src: Tensor, ptr: Sequence[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Indices of rows that are far from each other: a share of each range of rows.

    Args:
        src: `[rows, ...]`.
        ptr: where the ranges begin, and where the last one ends.
        ratio: the share, rounded up.
        random_start: begin with a random row of each range, and not with the first.

    Returns:
        Integers, range by range; each next row is the farthest from those before it.

    Raises:
        poptorch.Error: arguments of other types, or ranges that are not in `src`.
    """
    if not isinstance(src, Tensor):
        raise createPoptorchError(f"fps: src must be a torch.tensor, got {src!r}", id="operator")
    if not isinstance(ptr, list | tuple) or len(ptr) < 2 or not _integers(ptr):
        raise createPoptorchError(
            f"fps: ptr must be a list of at least two integers, got {ptr!r}", id="operator"
        )
    if not isinstance(ratio, float):
        raise createPoptorchError(f"fps: ratio must be a float, got {ratio!r}", id="operator")
    if not isinstance(random_start, bool):
        raise createPoptorchError(
            f"fps: random_start must be a bool, got {random_start!r}", id="operator"
        )
    try:
        return farthest_points(src, ptr, ratio, random_start=random_start)
    except ValueError as error:
        raise createPoptorchError(f"fps: {error}", id="operator") from error


def nearest(x: Tensor, y: Tensor, batch_x: Batch = None, batch_y: Batch = None) -> Tensor:
    """For each row of `x` the index of the nearest row of `y` in the same batch.

    Args:
        x: `[rows, ...]`.
        y: `[rows, ...]`, where a row has the shape of a row of `x`.
        batch_x: the number of the batch of each row of `x`; None: all are in one.
        batch_y: the number of the batch of each row of `y`; None: all are in one.

    Raises:
        poptorch.Error: arguments of other types, or of another length than their rows.
    """
    for name, tensor in (("x", x), ("y", y)):
        if not isinstance(tensor, Tensor):
            raise createPoptorchError(
                f"nearest: {name} must be a torch.tensor, got {tensor!r}", id="operator"
            )
    return nearest_points(x, y, _batch("batch_x", batch_x, x), _batch("batch_y", batch_y, y))


def _batch(name: str, batch: Batch, rows: Tensor) -> Tensor | None:
    """Numbers of batches as a tensor."""
    if isinstance(batch, list | tuple) and _integers(batch):
        batch = torch.tensor(batch, device=rows.device)
    if batch is None:
        return None
    if not isinstance(batch, Tensor):
        raise createPoptorchError(
            f"nearest: {name} must be a list of integers, a torch.tensor or None, got {batch!r}",
            id="operator",
        )
    if batch.shape != rows.shape[:1]:
        raise createPoptorchError(
            f"nearest: {name} has shape {list(batch.shape)}, for {rows.shape[0]} rows",
            id="operator",
        )
    return batch


def _integers(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) for value in values)


__all__ = ["fps", "nearest"]

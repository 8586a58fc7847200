"""Choose points of clouds that lie one behind the other: the farthest from each other, the nearest.

Source: PopTorch user guide, "poptorch.fps" and "poptorch.nearest"; Eldar et al., "The farthest
point strategy for progressive image sampling" (1997).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("farthest_points(Tensor points, Tensor starts, int[] ends, int[] counts) -> Tensor")


def _farthest(points: Tensor, starts: Tensor, ends: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Of each cloud `counts` points, the first of which is at `starts` within it."""
    rows = points.detach().flatten(1) if points.dim() > 1 else points.detach().unsqueeze(1)
    chosen = [torch.empty(0, dtype=torch.int64, device=points.device)]
    for (first, end), count, start in zip(pairwise(ends), counts, starts.tolist(), strict=True):
        cloud = rows[first:end].double()
        distance = torch.full((end - first,), float("inf"), dtype=torch.float64, device=rows.device)
        found = torch.empty(count, dtype=torch.int64, device=points.device)
        latest = torch.tensor(start, device=points.device)
        for place in range(count):
            found[place] = latest
            distance = torch.minimum(distance, (cloud - cloud[latest]).square().sum(1))
            latest = distance.argmax()
        chosen.append(found + first)
    return torch.cat(chosen)


def _shape(points: Tensor, starts: Tensor, ends: Sequence[int], counts: Sequence[int]) -> Tensor:
    return points.new_empty(sum(counts), dtype=torch.int64)


_library.impl("farthest_points", _farthest, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::farthest_points", _shape, lib=_library)


def farthest_points(
    points: Tensor, ends: Sequence[int], ratio: float = 0.5, *, random_start: bool = False
) -> Tensor:
    """Rows of clouds that are far from each other, as indices: each next one is the farthest from
    those before it, and of several the first.

    Args:
        points: `[rows, ...]`, all clouds one after the other.
        ends: where each cloud begins, and where the last one ends.
        ratio: how many of a cloud's rows are chosen, rounded up.
        random_start: begin with a random row of each cloud, and not with its first.

    Returns:
        int64, cloud by cloud.

    Raises:
        ValueError: clouds that are not in `points`, or a ratio outside of 0 to 1.
    """
    if list(ends) != sorted(ends) or ends[0] < 0 or ends[-1] > points.shape[0]:
        raise ValueError(f"clouds of rows {list(ends)} are not in {points.shape[0]} rows")
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio is {ratio}: choose a share from 0 to 1")
    sizes = [end - first for first, end in pairwise(ends)]
    counts = [ceil(ratio * size) for size in sizes]
    starts = torch.zeros(len(sizes), dtype=torch.int64, device=points.device)
    if random_start:
        drawn = torch.rand(len(sizes), device=points.device)
        starts = (drawn * torch.tensor(sizes, device=points.device)).long()
    chosen: Tensor = torch.ops.ipu.farthest_points(points, starts, list(ends), counts)
    return chosen


def nearest_points(
    x: Tensor, y: Tensor, clouds_of_x: Tensor | None = None, clouds_of_y: Tensor | None = None
) -> Tensor:
    """For each row of `x` the index of the nearest row of `y`, of several the first.

    Args:
        x, y: `[rows, ...]`.
        clouds_of_x, clouds_of_y: the number of each row's cloud: only rows of the same one are
            looked at. None: all rows are of cloud 0. A row without others in its cloud gets 0.
    """
    rows, others = (t.flatten(1) if t.dim() > 1 else t.unsqueeze(1) for t in (x, y))
    distance = torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist")
    if clouds_of_x is not None or clouds_of_y is not None:
        of_x = x.new_zeros(len(x), dtype=torch.int64) if clouds_of_x is None else clouds_of_x
        of_y = y.new_zeros(len(y), dtype=torch.int64) if clouds_of_y is None else clouds_of_y
        distance = distance.masked_fill(of_x[:, None] != of_y, float("inf"))
    return distance.argmin(1)

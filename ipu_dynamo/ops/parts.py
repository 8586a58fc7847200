"""Cut a dimension into parts."""

from itertools import pairwise


def parts(size: int, count: int) -> tuple[tuple[int, int], ...]:
    """Start and stop of `count` parts of 0..size, in order; the first ones may be one longer."""
    width, wider = divmod(size, count)
    starts = [i * width + min(i, wider) for i in range(count + 1)]
    return tuple(pairwise(starts))

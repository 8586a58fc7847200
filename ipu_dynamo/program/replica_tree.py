"""Say in which order values are summed over replicas: along one binary tree by replica number.

The tree is the same however replicas are spread over processes, so sums have the same bits. A
process adds what its own replicas hold of the tree, and only these sums cross to others.
"""

from collections.abc import Iterator


def additions(count: int) -> Iterator[tuple[int, int]]:
    """The additions that sum `count` values into the first one, each as (sum, term), by places.

    The sum of the values `lo` to `hi` is the sum of those below `mid` plus the sum of those from
    `mid` on, with `mid = lo +` the largest power of two below `hi - lo`. So three values are added
    in their order, and four as `(0 + 1) + (2 + 3)`.
    """
    yield from _additions(0, count)


def _additions(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    if hi - lo < 2:
        return
    mid = lo + (1 << (hi - lo - 1).bit_length() - 1)
    yield from _additions(lo, mid)
    yield from _additions(mid, hi)
    yield lo, mid

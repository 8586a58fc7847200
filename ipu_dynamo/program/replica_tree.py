"""Say in which order values are summed over replicas: along one binary tree by replica number.

The tree is the same however replicas are spread over processes, so sums have the same bits. A
process adds the values of its own replicas along the tree, and only these sums cross to others.
"""

from collections.abc import Iterator

# Of so many bytes each process gets the partial sums of all, and adds them. Of more bytes a process
# adds a part, and the sums are gathered, which waits for messages twice.
GATHERED_BYTES = 1 << 16


def additions(count: int) -> Iterator[tuple[int, int]]:
    """The additions that sum `count` values into the first one, each as (sum, term), by places.

    The values `lo` to `hi` are cut at `mid`. It is `lo` plus the largest power of two below
    `hi - lo`. The sum is that of the values below `mid`, plus that of the values from `mid` on. So
    three values are added in their order, and four as `(0 + 1) + (2 + 3)`.
    """
    yield from _additions(0, count)


def _additions(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    if hi - lo < 2:
        return
    mid = _middle(lo, hi)
    yield from _additions(lo, mid)
    yield from _additions(mid, hi)
    yield lo, mid


def subtrees(count: int, block: range) -> list[range]:
    """The largest subtrees of `count` values that are within a block of them, in order.

    A process adds the values of each, and these sums cross to other processes.
    """
    return _subtrees(0, count, block)


def _subtrees(lo: int, hi: int, block: range) -> list[range]:
    if hi <= block.start or block.stop <= lo:
        return []
    if block.start <= lo and hi <= block.stop:
        return [range(lo, hi)]
    mid = _middle(lo, hi)
    return _subtrees(lo, mid, block) + _subtrees(mid, hi, block)


def _middle(lo: int, hi: int) -> int:
    return lo + (1 << (hi - lo - 1).bit_length() - 1)

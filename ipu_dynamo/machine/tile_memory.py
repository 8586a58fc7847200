"""Deal tensors to tiles: each in grains, round-robin, from where the one before it ended.

Poplar's own placement is not known. A tensor's bytes on two tiles differ by at most one grain. The
fullest tile is the one with most of these additional grains.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ipu_dynamo.program.liveness import IpuLiveness, LiveTensor

_WEIGHT_GRAIN = 512  # bytes of a block of 16 x 16 halves
_GRAIN = 8
Bytes = NDArray[np.int64]  # of each tile


@dataclass
class Tiles:
    """The bytes of each of some tiles, while tensors come and go."""

    count: int
    nbytes: Bytes = field(init=False)
    start: int = 0  # the tile that gets the next grain

    def __post_init__(self) -> None:
        self.nbytes = np.zeros(self.count, np.int64)

    def place(self, tensor: LiveTensor) -> int:
        """Return the first tile of a tensor; the next one begins after its last grain."""
        first = self.start
        self.start = (first + _grains(tensor)[0]) % self.count
        return first

    def hold(self, tensor: LiveTensor, first: int, sign: int = 1) -> None:
        """Add a tensor that begins on a tile, or take it away."""
        grains, grain = _grains(tensor)
        each, more = divmod(grains, self.count)
        self.nbytes += sign * each * grain
        end = first + more
        self.nbytes[first : min(end, self.count)] += sign * grain
        self.nbytes[: max(end - self.count, 0)] += sign * grain


def _grains(tensor: LiveTensor) -> tuple[int, int]:
    """How many grains a tensor has, and the bytes of one."""
    grain = _WEIGHT_GRAIN if tensor.role == "weight" else _GRAIN
    return -(-tensor.nbytes // grain), grain


@dataclass(frozen=True)
class FullestStep:
    """The step at which a tile of an IPU holds most.

    Args:
        computing, transferring: the bytes of each tile there, temporary ones included.
    """

    step: int
    computing: Bytes
    transferring: Bytes

    @property
    def fullest(self) -> int:
        return int(max(self.computing.max(), self.transferring.max(initial=0)))


def fullest_step(
    live: IpuLiveness, temporaries: list[int], tiles: int, io_tiles: int
) -> FullestStep:
    """Find the step at which a tile holds most; of several, the one at which all tiles do.

    Args:
        temporaries: bytes of each computing tile, at each step.
        tiles: all of the IPU; `io_tiles` of them only transfer.
    """
    computing, transferring = Tiles(tiles - io_tiles), Tiles(max(io_tiles, 1))
    begins: dict[int, list[tuple[LiveTensor, Tiles, int]]] = {}
    ends: dict[int, list[tuple[LiveTensor, Tiles, int]]] = {}
    for tensor in live.tensors:
        group = transferring if tensor.io_tiles and io_tiles else computing
        placed = tensor, group, group.place(tensor)
        if not tensor.spans:
            group.hold(tensor, placed[2])
        for first, last in tensor.spans:
            begins.setdefault(first, []).append(placed)
            ends.setdefault(last + 1, []).append(placed)
    best: FullestStep | None = None
    key = (0, 0)
    held = live.nbytes or (live.always,)
    for step in range(max(len(live.steps), 1)):
        for tensor, group, first in ends.get(step, ()):
            group.hold(tensor, first, -1)
        for tensor, group, first in begins.get(step, ()):
            group.hold(tensor, first)
        more = temporaries[step] if live.steps else 0
        most = int(max(computing.nbytes.max() + more, transferring.nbytes.max()))
        total = held[step] + more * computing.count
        if best is None or (most, total) > key:
            key = most, total
            own = transferring.nbytes[:io_tiles].copy()
            best = FullestStep(step, computing.nbytes + more, own)
    assert best is not None
    return best

"""Say which host transfers of a micro-batch add to it, and which go on while IPUs compute."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ipu_dynamo.machine.transfer_times import TimedMove
from ipu_dynamo.program.ir.program import Program

Times = Counter[int]  # cycles by IPU
Loop = Literal["accumulation_loop", "device_iteration_loop"]


@dataclass(frozen=True)
class HostTransfers:
    """The host transfers of a program.

    Args:
        moves: of a micro-batch.
        micro_batches, steps: micro-batches of a step, and steps of a call.
        sync: cycles of a barrier with the host; there is one for each micro-batch.
    """

    program: Program
    moves: Sequence[TimedMove]
    micro_batches: int
    steps: int
    sync: int

    @cached_property
    def loads(self) -> Times:
        """Cycles that add to each micro-batch before it is computed."""
        times = self._times(hidden=False, loads=True)
        return times + self._syncs(times)

    @cached_property
    def stores(self) -> Times:
        """Cycles that add to each micro-batch after it was computed."""
        times = self._times(hidden=False, loads=False)
        return times if self.loads else times + self._syncs(times)

    @cached_property
    def hidden(self) -> Times:
        """Cycles of each micro-batch that go on while the IPU computes."""
        times = self._times(hidden=True, loads=True) + self._times(hidden=True, loads=False)
        return times if self.loads or self.stores else times + self._syncs(times)

    @cached_property
    def once(self) -> Times:
        """Cycles at the end of a step, of results that are returned once."""
        return _sum(move for move in self.moves if move.once)

    def ends(self, loop: Loop, *, loads: bool) -> Times:
        """Cycles of the first loads, or of the last stores, of a loop: they stand alone."""
        return self._times(hidden=True, loads=loads, loop=loop)

    @property
    def stops_all(self) -> bool:
        """Whether a transfer of one IPU stops the others of its replica."""
        return self.program.sync_pattern != "single_pipeline"

    def _times(self, *, hidden: bool, loads: bool, loop: Loop | None = None) -> Times:
        return _sum(
            move
            for move in self.moves
            if not move.once
            and self._is_hidden(move) == hidden
            and (move.move.src == "host") == loads
            and loop in (None, move.loop)
        )

    def _is_hidden(self, move: TimedMove) -> bool:
        """Whether another micro-batch computes meanwhile: a loop of one has none."""
        runs = self.micro_batches * (self.steps if move.loop == "device_iteration_loop" else 1)
        return move.hidden and runs > 1

    def _syncs(self, times: Times) -> Times:
        """A barrier for all IPUs, or for each one that transfers."""
        every = sorted(times)
        return Counter(dict.fromkeys(every[:1] if self.stops_all else every, self.sync))


def _sum(moves: Iterable[TimedMove]) -> Times:
    times: Times = Counter()
    for move in moves:
        times[move.ipu] += move.cycles
    return times

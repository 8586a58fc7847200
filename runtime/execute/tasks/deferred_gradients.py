"""Add the gradients that calls return, in the order of micro-batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_add_
from ipu_dynamo.program.deferred import Deferred
from ipu_dynamo.program.schedule.schedule import Task


class Gradients:
    """The gradients of micro-batches that have run and were not added yet.

    Args:
        deferred: what makes them.
        registers: where the values of a micro-batch are, by name.
        tensors: of every variable.
    """

    def __init__(
        self, deferred: Deferred, registers: Mapping[str, int], tensors: Mapping[str, Tensor]
    ) -> None:
        self._registers = [registers[name] for name in deferred.gradients]
        self._accumulators = [tensors[name] for name in deferred.accumulators]
        seen: Counter[str] = Counter()
        self._rounds: list[list[int]] = []  # in each an accumulator is written once
        for place, name in enumerate(deferred.accumulators):
            if seen[name] == len(self._rounds):
                self._rounds.append([])
            self._rounds[seen[name]].append(place)
            seen[name] += 1
        self._waiting: dict[int, list[Tensor]] = {}

    def take(self, micro_batch: int, values: Sequence[Any]) -> None:
        """Keep what a micro-batch has made."""
        self._waiting[micro_batch] = [values[register] for register in self._registers]

    def add(self, task: Task) -> None:
        """Add those of a micro-batch, whose turn it is."""
        parts = self._waiting.pop(task.micro_batch)
        for places in self._rounds:
            foreach_add_([self._accumulators[i] for i in places], [parts[i] for i in places])

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._waiting.clear()

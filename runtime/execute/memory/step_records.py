"""Keep what variables hold before and after the updates of a call's steps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ipu_dynamo.program import Output
from ipu_dynamo.runtime.execute.host_io.batching import Batching, join

When = Literal["before", "after"]  # the update
Read = Callable[[str, int], Tensor]  # the tensor of a variable on a replica


@dataclass(frozen=True, slots=True)
class Wanted:
    """A variable whose values are wanted.

    Args:
        variable: its name.
        when: in each step.
        returns: of which micro-batches, and how they are joined; its name counts for nothing.
    """

    variable: str
    when: When
    returns: Output


@dataclass
class StepRecords:
    """The values that variables have in the steps of a call.

    Args:
        wanted: by a name for each.
        batching: of the program.
        steps: updates in a call; one where there are none.
        unread: tensors of the model that the program does without, by name.

    Attributes:
        last: the joined tensors of the last complete call, by name.
    """

    wanted: dict[str, Wanted]
    batching: Batching
    steps: int
    unread: Mapping[str, Tensor]
    last: dict[str, Tensor] = field(default_factory=dict)
    _values: dict[tuple[str, When, int], list[Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget what a call that failed has left."""
        self._values = {}

    def note(self, when: When, step: int, read: Read) -> None:
        """Keep what is wanted of a step."""
        due = [record for record in self.wanted.values() if self._is_wanted(record, when, step)]
        replicas = range(self.batching.replicas)
        for name in {record.variable for record in due}:
            tensors = [
                self.unread[name] if name in self.unread else read(name, r) for r in replicas
            ]
            self._values[name, when, step] = [tensor.clone() for tensor in tensors]

    def end(self, home: torch.device) -> None:
        """Join the values of a call that is complete, and bring them where its results go."""
        self.last = {name: self._joined(record).to(home) for name, record in self.wanted.items()}
        self._values = {}

    def _is_wanted(self, record: Wanted, when: When, step: int) -> bool:
        return record.when == when and any(map(any, self._rows(record, step)))

    def _rows(self, record: Wanted, step: int) -> Sequence[Collection[bool]]:
        """For each device iteration of a step, the micro-batches whose value is wanted."""
        each = self.batching.iterations // self.steps
        return self.batching.kept(record.returns)[step * each : (step + 1) * each]

    def _joined(self, record: Wanted) -> Tensor:
        values = [
            value
            for step in range(self.steps)
            for row in self._rows(record, step)
            for kept in row
            if kept
            for value in self._values[record.variable, record.when, step]
        ]
        return join(record.returns, values, self.batching)

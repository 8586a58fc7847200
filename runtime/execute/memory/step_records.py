"""Keep the values of variables before and after the updates of a call's steps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ipu_dynamo.program import Output
from ipu_dynamo.runtime.execute.host_io.batching import Batching, join
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.observer import Observer, Read

When = Literal["before", "after"]  # the update


@dataclass(frozen=True, slots=True)
class RecordedVariable:
    """A variable whose values are wanted.

    Args:
        variable: its name.
        when: in each step.
        returns: the micro-batches, and the way to join them; its name is ignored.
    """

    variable: str
    when: When
    returns: Output


@dataclass
class StepRecords(Observer):
    """The values that variables have in the steps of a call.

    Args:
        wanted: by a name for each.
        batching: of the program.
        steps: updates in a call; 1 if there are none.
        unread: tensors of the model that the program does without, by name.

    Attributes:
        last: the joined tensors of the last complete call, by name.
    """

    wanted: dict[str, RecordedVariable]
    batching: Batching
    steps: int
    unread: Mapping[str, Tensor]
    last: dict[str, Tensor] = field(default_factory=dict)
    _values: dict[tuple[str, When, int], list[Tensor]] = field(default_factory=dict)

    def update_began(self, step: int, read: Read) -> None:
        self._note("before", step, read)

    def step_ended(self, step: int, read: Read) -> None:
        self._note("after", step, read)

    def call_ended(self, streams: HostStreams, complete: bool) -> None:
        """Join the values of a complete call, on the device of its results."""
        if complete:
            results_device = streams.results_device
            self.last = {
                name: self._joined(of).to(results_device) for name, of in self.wanted.items()
            }
        self._values = {}

    def _note(self, when: When, step: int, read: Read) -> None:
        """Keep the wanted values of a step."""
        due = [record for record in self.wanted.values() if self._is_wanted(record, when, step)]
        replicas = range(self.batching.replicas)
        for name in {record.variable for record in due}:
            tensors = [
                self.unread[name] if name in self.unread else read(name, r) for r in replicas
            ]
            self._values[name, when, step] = [tensor.clone() for tensor in tensors]

    def _is_wanted(self, record: RecordedVariable, when: When, step: int) -> bool:
        return record.when == when and any(map(any, self._rows(record, step)))

    def _rows(self, record: RecordedVariable, step: int) -> Sequence[Collection[bool]]:
        """For each device iteration of a step, the micro-batches whose value is wanted."""
        each = self.batching.iterations // self.steps
        return self.batching.kept(record.returns)[step * each : (step + 1) * each]

    def _joined(self, record: RecordedVariable) -> Tensor:
        values = [
            value
            for step in range(self.steps)
            for row in self._rows(record, step)
            for kept in row
            if kept
            for value in self._values[record.variable, record.when, step]
        ]
        return join(record.returns, values, self.batching)

"""Define what runs the steps of a call, in whichever way."""

from typing import Protocol

from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.observer import Observer
from ipu_dynamo.runtime.execute.transaction.commit import Commit


class StepForm(Protocol):
    """A way to run steps: a loop of micro-batches, a fused function, a replayed recording.

    A form opens each step, votes and writes by `commit`, or rebinds variables by it. It leaves a
    failed step to the executable, which settles it.

    Attributes:
        commit: what makes each step complete or undone.
    """

    commit: Commit

    def prepare(self, hyperparameters: Hyperparameters) -> object:
        """Choose what runs with these hyperparameters, or make it."""

    def run(self, steps: int, streams: HostStreams, observer: Observer) -> None:
        """Run the steps of a call with the hyperparameters that were prepared last.

        Raises:
            ExecutionError: an operator failed. Complete steps before it last.
            UpdateError: an update failed, after it had begun to write variables.
        """

    def plan(self) -> HostPlan:
        """Say what a step does, for the printed host program."""

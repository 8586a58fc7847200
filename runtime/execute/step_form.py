"""Describe the forms of a step, and the inputs of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ipu_dynamo.program import HostProgram
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.fused_step import FuseAgain
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.observer import Observer
from ipu_dynamo.runtime.execute.transaction.commit import Commit
from ipu_dynamo.runtime.execute.transaction.update_runs import UpdateRecipe


class StepForm(Protocol):
    """A way to run steps: a loop of micro-batches, a fused function, a replayed recording.

    A form opens each step, votes and writes by `commit`, or rebinds variables by it. It leaves a
    failed step to the executable, which settles it. Between calls it keeps nothing that the next
    step depends on, so another form of the same program may run that.

    Attributes:
        commit: makes each step complete or undone.
    """

    commit: Commit

    def prepare(self, hyperparameters: Hyperparameters) -> object:
        """Choose the form of the step for these hyperparameters, or make it."""

    def run(self, steps: int, streams: HostStreams, observer: Observer) -> None:
        """Run the steps of a call with the hyperparameters that were prepared last.

        Raises:
            ExecutionError: an operator failed. Complete steps before it last.
            UpdateError: an update failed, after it had begun to write variables.
        """

    def plan(self) -> HostPlan:
        """Describe a step for the printed host program."""


@dataclass(frozen=True)
class FormInputs:
    """The parts of a form of a step, except for variables; see `Executable`."""

    host: HostProgram
    engine: Engine
    workers: int | None = 1
    fuse_again: FuseAgain | None = None
    update_recipe: UpdateRecipe | None = None
    others: Sequence[HostProgram] = ()

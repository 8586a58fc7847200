"""Make each step complete or undone, in whichever way it runs.

One state machine serves all forms of a step:

    complete --open--> open --vote--> voted --write--> writing --complete--> complete
    open, voted, writing --recover--> complete        the step is undone
    complete, pending --rebind--> pending             a step without Python in it, complete at once
    pending --settle--> complete                      the stored tensors have their values

A step that writes variables in place opens, votes, and writes lasting ones. A step that computes
new values elsewhere rebinds the variables to these, in one assignment. Their stored tensors get the
values when the call ends.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.ops.private.native import foreach_copy_
from ipu_dynamo.runtime.execute.memory.storage import Storage

Phase = Literal["complete", "open", "voted", "writing", "pending"]
Event = Literal["open", "vote", "write", "complete", "recover", "rebind", "settle"]


class _Next(dict[Phase, Phase]):
    """The phase after an event, by the phase before it."""

    def __init__(self, event: Event, **phases: Phase) -> None:
        super().__init__(phases)  # type: ignore[arg-type]
        self.event = event

    def __missing__(self, phase: Phase) -> Phase:
        raise IpuError(f"a step that is {phase} cannot {self.event}")


TRANSITIONS: dict[Event, _Next] = {
    "open": _Next("open", complete="open"),
    "vote": _Next("vote", open="voted"),
    "write": _Next("write", voted="writing"),
    "complete": _Next("complete", voted="complete", writing="complete"),
    "recover": _Next("recover", open="complete", voted="complete", writing="complete"),
    "rebind": _Next("rebind", complete="pending", pending="pending"),
    "settle": _Next("settle", pending="complete"),
}


class Undo(Protocol):
    """Copies of the memory that a form of a step writes."""

    def keep(self) -> None:
        """Copy the memory that micro-batches write, before the first one."""

    def guard(self) -> None:
        """Copy the memory that the commit writes, if commits are guarded."""

    def undo(self, *, written: bool) -> None:
        """Restore the copies. `written`: the commit has begun, too."""

    def failure(self, error: Exception) -> Exception:
        """The error of a commit that met `error`."""

    def check(self) -> None:
        """Raise as long as variables hold a part of a failed commit."""

    def rewritten(self, names: Iterable[str]) -> None:
        """Follow variables that were overwritten between two steps."""


class NothingKept:
    """The way of steps that write no variable before they are complete."""

    def keep(self) -> None:
        """Nothing to keep."""

    guard = check = keep

    def undo(self, *, written: bool) -> None:
        """Nothing to put back."""

    def failure(self, error: Exception) -> Exception:
        """The error itself."""
        return error

    def rewritten(self, names: Iterable[str]) -> None:
        """Nothing depends on them."""


class PendingSteps(Protocol):
    """Steps that are running; each gives variables new values."""

    @property
    def steps(self) -> int:
        """The number of complete ones."""

    @property
    def values(self) -> Sequence[Tensor]:
        """The values of the variables after these."""


class _OneStep:
    def __init__(self, values: Sequence[Tensor]) -> None:
        self.steps, self.values = 1, values


# stored tensors, and the steps whose values they get
_Pending = tuple[Sequence[Tensor], PendingSteps]


class Commit:
    """The outcome of the last step, over the variables of `storage`.

    Invariant: after `settle` all variables hold their values after the last complete step, or
    `check` raises. An error, an interrupt or a fork may have ended any method at any point, also
    `settle` itself.

    Attributes:
        signals: the block in which signal handlers wait.
        check, rewritten: see `Undo`.
    """

    def __init__(self, storage: Storage, undo: Undo) -> None:
        self._storage, self._undo = storage, undo
        self.signals = DeferredSignals()
        self.check, self.rewritten = undo.check, undo.rewritten
        # One tuple, so that an interrupt comes before a step's end or after it: the phase, the
        # number of complete steps before those that are pending, and these.
        self._state: tuple[Phase, int, _Pending | None] = "complete", 0, None

    @property
    def phase(self) -> Phase:
        """The state of the last step."""
        return self._state[0]

    @property
    def steps(self) -> int:
        """The number of device iterations that complete steps have run."""
        _, count, pending = self._state
        return count if pending is None else count + pending[1].steps

    @property
    def settled(self) -> bool:
        """Whether no step has to be undone, and no value to be stored."""
        return self._state[0] == "complete"

    def open(self) -> None:
        """Copy the memory that micro-batches write, before the first one."""
        after = TRANSITIONS["open"][self._state[0]]
        self._undo.keep()
        self._state = after, self._state[1], None

    def vote(self, agreed: bool = True) -> None:
        """Decide that the step is to last, before anything that lasts is written.

        Raises:
            IpuError: it is not `agreed`. The step is to be undone.
        """
        after = TRANSITIONS["vote"][self._state[0]]
        if not agreed:
            raise IpuError("a step is undone: not all of its parts succeeded")
        self._state = after, self._state[1], None

    def write(self, write: Callable[[], None], steps: int, *, counts: bool = False) -> None:
        """Write lasting variables, with signals deferred. The write counts as `steps` steps.

        Args:
            counts: even if it fails, as other ranks complete the step.

        Raises:
            UpdateError: `write` has failed.
        """
        with self.signals:
            after = TRANSITIONS["write"][self._state[0]]
            self._undo.guard()
            self._state = after, self._state[1], None
            try:
                write()
            except Exception as error:
                if counts:
                    self._state = after, self._state[1] + steps, None
                raise self._undo.failure(error) from error
            self._state = TRANSITIONS["complete"][after], self._state[1] + steps, None

    def complete(self, steps: int) -> None:
        """Complete the step, which counts as `steps` steps."""
        self._state = TRANSITIONS["complete"][self._state[0]], self._state[1] + steps, None

    def rebind(self, stored: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Complete a step: the variables with these stored tensors now hold `values`."""
        count, pending = self._state[1:]
        if pending is not None:
            count += pending[1].steps
        self._state = TRANSITIONS["rebind"][self._state[0]], count, (stored, _OneStep(values))

    def follow(self, stored: Sequence[Tensor], steps: PendingSteps) -> None:
        """Let variables hold the values of `steps`, those that are complete now or later."""
        self._state = TRANSITIONS["rebind"][self._state[0]], self.steps, (stored, steps)

    def settle(self) -> None:
        """Undo a step that is not complete, and store the values of complete ones."""
        phase, count, pending = self._state
        if phase == "complete":
            return
        if pending is not None:
            stored, steps = pending
            if steps.steps:
                foreach_copy_(stored, steps.values)
            self._state = TRANSITIONS["settle"][self._state[0]], count + steps.steps, None
        else:
            self._undo.undo(written=phase == "writing")
            self._state = TRANSITIONS["recover"][self._state[0]], count, None

    def end(self) -> None:
        """Settle at the end of a call. An interrupt meanwhile comes out of it afterwards."""
        try:
            self.settle()
        except BaseException:
            with self.signals:
                self.settle()
            raise

    def current(self, name: str, replica: int = 0) -> Tensor:
        """The tensor with a variable's value on a replica, also between steps that rebind it."""
        stored, pending = self._storage.tensor(name, replica), self._state[2]
        if pending is not None:
            for tensor, value in zip(pending[0], pending[1].values, strict=True):
                if tensor is stored:
                    return value
        return stored

"""Make a step happen as a whole or not at all: undo what an incomplete one has written.

A step writes working memory first: running statistics, and sums of gradients. Its *commit* writes
what lasts: parameters, the optimiser's states, the loss scale.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from ipu_dynamo.errors import UpdateError
from ipu_dynamo.ops.private.native import foreach_copy_, foreach_zero_
from ipu_dynamo.program import Program
from ipu_dynamo.program.schedule.dependencies import changed_variables
from ipu_dynamo.runtime.update.update_tensors import distinct

_Phase = Literal["complete", "open", "commit"]
_NAMED = 3  # variables in a message


class Transaction:
    """The memory that the steps of a program write, and what has become of the last step.

    Invariant: after `recover` all tensors are as they were when the last step was complete, or
    `check` raises. That holds wherever an error, an interrupt or a fork has ended a step: each of
    the methods may have been left at any point, and `recover` be called again.

    Args:
        written: tensors that micro-batches write, such as the statistics of a batch norm.
        sums: tensors that are zero at the beginning of each step.
        lasting: tensors that a commit writes, by the names of their variables.
        guard: keep copies of `lasting` during a commit.
        reload: take notice that these copies were put back.
    """

    def __init__(
        self,
        written: Sequence[Tensor],
        sums: Sequence[Tensor],
        lasting: Mapping[str, Sequence[Tensor]],
        *,
        guard: bool = False,
        reload: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps = 0  # complete ones
        self._written, self._sums = list(written), list(sums)
        self._lasting = {name: list(tensors) for name, tensors in lasting.items()}
        every = [tensor for tensors in lasting.values() for tensor in tensors]
        self._guarded = distinct(every) if guard else []
        self._reload = reload
        self._kept = [tensor.clone() for tensor in self._written]
        self._copies = [tensor.clone() for tensor in self._guarded]
        self._phase: _Phase = "complete"
        # Variables that a failed commit may have written in part, with the versions of their
        # tensors since: who writes one anew changes these.
        self._partial: dict[str, list[int]] = {}

    def begin(self) -> None:
        """Keep what the micro-batches of a step write."""
        if self._written:
            foreach_copy_(self._kept, self._written)
        self._phase = "open"

    def commit(self) -> None:
        """Say that from now on the step writes what lasts."""
        if self._guarded:
            foreach_copy_(self._copies, self._guarded)
        self._phase = "commit"

    def complete(self, steps: int) -> None:
        """Say that the step is complete; it counts as so many."""
        self._phase, self.steps = "complete", self.steps + steps

    @property
    def settled(self) -> bool:
        """Whether there is nothing to recover."""
        return self._phase == "complete"

    def recover(self) -> None:
        """Undo a step that is not complete."""
        phase = self._phase
        if phase == "complete":
            return
        if self._written:
            foreach_copy_(self._written, self._kept)
        if self._sums:
            foreach_zero_(self._sums)
        if phase == "commit" and self._guarded:
            foreach_copy_(self._guarded, self._copies)
            self._reload()
        elif phase == "commit":
            self._partial = {name: _versions(of) for name, of in self._lasting.items()}
        self._phase = "complete"

    def failure(self, error: Exception) -> Exception:
        """What a commit that met an error raises: what later calls raise, if it is not undone."""
        if self._guarded:
            problem, hint = "an update failed; its step is undone", "call again"
            return UpdateError(f"{problem}: {error}", hint=hint)
        return UpdateError(_text(list(self._lasting)), hint=_HINT)

    def rewritten(self, names: Iterable[str]) -> None:
        """Say that somebody has written variables anew, though not their tensors."""
        for name in names:
            self._partial.pop(name, None)
        if self._partial:
            self._drop_rewritten()

    def check(self) -> None:
        """Hold calls back as long as a failed commit is not made good.

        Raises:
            UpdateError: there are variables that it may have written, and nobody has since.
        """
        if not self._partial:
            return
        self._drop_rewritten()
        if self._partial:
            raise UpdateError(_text(list(self._partial)), hint=_HINT)
        if self._sums:
            foreach_zero_(self._sums)

    def _drop_rewritten(self) -> None:
        self._partial = {
            name: versions
            for name, versions in self._partial.items()
            if any(map(int.__eq__, _versions(self._lasting[name]), versions))
        }


_HINT = (
    "write weights and the optimiser's state again, as from a checkpoint (load_state_dict of the "
    "model and of the optimizer); Options(guard_updates=True) keeps copies, and restores them"
)


def _text(names: Sequence[str]) -> str:
    named = ", ".join(f"%{name}" for name in names[:_NAMED])
    others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"an update failed, and may have written a part of {named}{others}"


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often tensors were written, as torch counts."""
    return [tensor._version for tensor in tensors]


def transaction_of(
    program: Program,
    replicas: int,
    tensor: Callable[[str, int], Tensor],
    lasting: Mapping[str, Sequence[Tensor]],
    *,
    guard: bool,
    reload: Callable[[], None],
) -> Transaction:
    """The transaction of a step of `program`, whose variables `tensor` finds by replica."""
    names = changed_variables(program)
    written, sums = [], []
    for variable in program.variables:
        for replica in variable.holders(replicas):
            if variable.kind == "accumulator":
                sums.append(tensor(variable.name, replica))
            elif variable.name in names:
                written.append(tensor(variable.name, replica))
    return Transaction(written, sums, lasting, guard=guard, reload=reload)

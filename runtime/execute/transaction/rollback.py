"""Restore memory that an incomplete step has written in place.

A step writes working memory first: running statistics, and sums of gradients. Its *commit* writes
the lasting variables: parameters, the optimiser's states, the loss scale.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from torch import Tensor

from ipu_dynamo.errors import UpdateError
from ipu_dynamo.ops.private.native import foreach_copy_, foreach_zero_
from ipu_dynamo.program import Program
from ipu_dynamo.program.schedule.dependencies import changed_variables
from ipu_dynamo.program.share import OwnReplicas
from ipu_dynamo.runtime.update.update_tensors import distinct

_NAMED = 3  # variables in a message


class Rollback:
    """The memory that the steps of a program write in place, and copies of it.

    Args:
        written: tensors that micro-batches write, such as the statistics of a batch norm.
        sums: tensors that are zero at the beginning of each step.
        lasting: tensors that a commit writes, by the names of their variables.
        guard: keep copies of `lasting` during a commit.
        states: the variables of optimisers' states.
        reload: is called after states were put back or overwritten.
    """

    def __init__(
        self,
        written: Sequence[Tensor],
        sums: Sequence[Tensor],
        lasting: Mapping[str, Sequence[Tensor]],
        *,
        guard: bool = False,
        states: Set[str] = frozenset(),
        reload: Callable[[], None] = lambda: None,
    ) -> None:
        self._written, self._sums = list(written), list(sums)
        self._lasting = {name: list(tensors) for name, tensors in lasting.items()}
        every = [tensor for tensors in lasting.values() for tensor in tensors]
        self._guarded = distinct(every) if guard else []
        self._states, self._reload = states, reload
        self._kept = [tensor.clone() for tensor in self._written]
        self._copies = [tensor.clone() for tensor in self._guarded]
        # Variables that a failed commit may have written in part, with the versions of their
        # tensors since: who writes one anew changes these.
        self._partial: dict[str, list[int]] = {}

    def keep(self) -> None:
        """Copy the memory that micro-batches write."""
        if self._written:
            foreach_copy_(self._kept, self._written)

    def before(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor that micro-batches write; of another one the tensor itself."""
        memory = tensor.data_ptr(), tensor.shape
        pairs = zip(self._written, self._kept, strict=True)
        return next((kept for w, kept in pairs if (w.data_ptr(), w.shape) == memory), tensor)

    def guard(self) -> None:
        """Copy the memory that the commit writes, if commits are guarded."""
        if self._guarded:
            foreach_copy_(self._copies, self._guarded)

    def undo(self, *, written: bool) -> None:
        """Restore the copies. Note the variables that a commit without copies may have written."""
        if self._written:
            foreach_copy_(self._written, self._kept)
        if self._sums:
            foreach_zero_(self._sums)
        if written and self._guarded:
            foreach_copy_(self._guarded, self._copies)
            self._reload()
        elif written:
            self._partial = {name: _versions(of) for name, of in self._lasting.items()}

    def failure(self, error: Exception) -> Exception:
        """The error of a commit that met `error`; without copies, later calls raise it, too."""
        if self._guarded:
            problem, hint = "an update failed; its step is undone", "call again"
            return UpdateError(f"{problem}: {error}", hint=hint)
        return UpdateError(_text(list(self._lasting)), hint=_HINT)

    def rewritten(self, names: Iterable[str]) -> None:
        """Follow variables that were overwritten between two steps."""
        for name in names:
            self._partial.pop(name, None)
        if self._partial:
            self._drop_rewritten()
        if not self._states.isdisjoint(names):
            self._reload()

    def check(self) -> None:
        """Hold calls back as long as a failed commit is not made good.

        Raises:
            UpdateError: it may have written variables, and they were not written since.
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


def rollback_of(
    program: Program,
    replicas: OwnReplicas,
    tensor: Callable[[str, int], Tensor],
    lasting: Mapping[str, Sequence[Tensor]],
    *,
    guard: bool,
    reload: Callable[[], None],
    copies: Sequence[Tensor] = (),
) -> Rollback:
    """Make the rollback of a program's steps.

    Args:
        tensor: finds a variable on a replica.
        copies: of variables that another rank's first replica writes.
    """
    names = changed_variables(program)
    written, sums = [*copies], []
    for variable in program.variables:
        for replica in replicas.holders(variable):
            if variable.kind == "accumulator":
                sums.append(tensor(variable.name, replica))
            elif variable.name in names:
                written.append(tensor(variable.name, replica))
    states = frozenset(v.name for v in program.variables if v.kind == "state")
    return Rollback(written, sums, lasting, guard=guard, states=states, reload=reload)

"""Hold the tensors of a program's variables: their one owner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import InputError
from ipu_dynamo.program import Program
from ipu_dynamo.program.share import OwnReplicas

# By name, the value of a variable on all replicas, or its values on each replica. A value has a
# leading dimension over groups of replicas if its variable has groups.
Values = Mapping[str, Tensor | Sequence[Tensor]]


class Storage:
    """The variables of this process's replicas.

    A variable has a stored tensor, the one that it was given. On each replica it has a separate
    tensor or a part of that. Replicated variables are shared by the replicas of all groups, or of
    theirs; the others are copied for each. The program's first replica has the stored tensor
    itself. If another process runs that replica, the stored tensor is a copy of its value. Within a
    call of a fused step the newest values are elsewhere: `Commit.current` finds them, and
    `Commit.settle` writes them to stored tensors.

    Args:
        program: with the variables that are here.
        tensors: the stored one of every variable, also of those of other ranks; with a leading
            dimension over groups of replicas, where it has those.
        replicas: those that run here.

    Attributes:
        waiting: values that were written within a call, for the next step.
        rewritten: is called with the names of variables after `write`.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        replicas: OwnReplicas,
    ) -> None:
        self._program, self._replicas = program, replicas
        self._stored_tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._unshared = [
            variable.name
            for variable in program.variables
            if not variable.replicated and variable.kind != "accumulator"
        ]
        runs_first = replicas.own.start == 0  # the program's first replica, which is never a copy
        self._copies = replicas.places[int(runs_first) :]
        self._tensors = [self._tensors_of(replica) for replica in replicas.places]
        # An entry is set, read and deleted in one operation of the interpreter: without a lock.
        self.waiting: dict[str, Tensor | Sequence[Tensor]] = {}
        self.rewritten: Callable[[Iterable[str]], None] = lambda names: None
        # As torch counts writes; None: a call was interrupted, and all writes since are its own.
        self._versions: list[int] | None = self._own_versions()

    def _tensors_of(self, replica: int) -> dict[str, Tensor]:
        """The tensor of every variable on a replica."""
        tensors = {}
        for variable in self._program.variables:
            tensor = self._stored_tensors[variable.name]
            if variable.groups is not None:
                tensor = tensor[self._replicas.groups_of(variable.groups)[replica]]
            elif not variable.replicated:
                places = self._replicas.places[1:]
                if replica in (places if variable.kind == "accumulator" else self._copies):
                    tensor = tensor.clone()
            tensors[variable.name] = tensor
        return tensors

    def frames(self, registers: Mapping[str, int]) -> list[list[Any]]:
        """For every replica that runs here, the registers with which a micro-batch begins.

        Args:
            registers: of the program's values, by name.
        """
        frames = []
        for tensors in self._tensors:
            frame: list[Any] = [None] * (max(registers.values(), default=-1) + 1)
            for name, tensor in tensors.items():
                frame[registers[name]] = tensor
            frames.append(frame)
        return frames

    def tensor(self, name: str, replica: int = 0) -> Tensor:
        """The tensor that holds a variable on a replica, by its place among those here."""
        return self._tensors[replica][name]

    def stored_tensor(self, name: str) -> Tensor:
        """The tensor that a variable was given."""
        return self._stored_tensors[name]

    def of_replicas(self) -> dict[str, list[Tensor]]:
        """For every variable, its tensor on each replica."""
        return {
            variable.name: [
                self.tensor(variable.name, replica) for replica in self._replicas.places
            ]
            for variable in self._program.variables
        }

    def check(self, values: Values) -> None:
        """Check that `values` are for variables, and have their shapes.

        Raises:
            InputError: one is not.
        """
        for name, value in values.items():
            if name not in self._stored_tensors:
                raise InputError(f"the program has no variable %{name}")
            of_each = [value] if isinstance(value, Tensor) else value
            stored_tensors = [
                self._stored_tensors[name],
                *(self.tensor(name, r) for r in range(1, len(of_each))),
            ]
            for stored_tensor, own in zip(stored_tensors, of_each, strict=True):
                if own.shape != stored_tensor.shape:
                    problem = f"a value of %{name} has shape {list(own.shape)}"
                    raise InputError(f"{problem}, and the variable {list(stored_tensor.shape)}")

    def write(self, values: Values) -> None:
        """Overwrite variables between two steps.

        Args:
            values: the new value of each variable by name. It may be the tensor that the variable
                was given: that holds the value already.
        """
        if between_calls := self._versions is not None:
            self.spread_changes()
        done = []
        try:
            with torch.no_grad():
                for name, value in values.items():
                    done.append(name)
                    if not isinstance(value, Tensor):
                        for replica, own in enumerate(value):
                            self.tensor(name, replica).copy_(own)
                        continue
                    if not self.is_stored(name, value):
                        self._stored_tensors[name].copy_(value)
                    self._spread([name])
        finally:
            if between_calls:
                self.keep_writes()
            self.rewritten(done)

    def is_stored(self, name: str, value: Tensor | Sequence[Tensor]) -> bool:
        """Whether a value is in the memory that a variable was given."""
        if not isinstance(value, Tensor) or not value.numel():
            return False
        return value.data_ptr() == self._stored_tensors[name].data_ptr()

    def write_waiting(self) -> None:
        """Overwrite variables with the values that were kept for the next step."""
        values = dict(self.waiting)
        self.write(values)
        for name, value in values.items():
            if self.waiting.get(name) is value:
                del self.waiting[name]

    def write_later(self, values: Values) -> None:
        """Keep copies of `values`, to be written before the next step."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self.waiting[name] = value if self.is_stored(name, value) else value.clone()
            else:
                self.waiting[name] = [own.clone() for own in value]

    def spread_changes(self) -> None:
        """Copy the user's writes into stored tensors since `keep_writes` to all replicas."""
        if self._unshared and self._own_versions() != self._versions:
            self._spread(self._unshared)

    def _spread(self, names: Iterable[str]) -> None:
        """Give all replicas the values of stored tensors."""
        for name in names:
            if name in self._unshared:
                for replica in self._copies:
                    self.tensor(name, replica).copy_(self._stored_tensors[name])

    def expect_writes(self) -> None:
        """Say that from now on replicas write their own tensors."""
        self._versions = None

    def keep_writes(self, *, unless_known: bool = False) -> None:
        """Treat all writes until now as each replica's own."""
        if self._versions is None or not unless_known:
            self._versions = self._own_versions()

    def _own_versions(self) -> list[int]:
        """How often stored tensors were written, as torch counts, of which replicas have copies."""
        return [self._stored_tensors[name]._version for name in self._unshared]

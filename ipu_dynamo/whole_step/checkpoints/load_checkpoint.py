"""Let a training step go on from a checkpoint."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import InputError, RanksDiffer
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import Program
from ipu_dynamo.rank_number import this_rank
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.ranks.agreement import do_together
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.checkpoints.checkpoint_files import (
    HEAD,
    LATEST,
    CheckpointHead,
    Folder,
    latest_checkpoint,
    read_checkpoint,
)
from ipu_dynamo.whole_step.checkpoints.checkpoint_parts import (
    REPLICA,
    check_step,
    on_replica,
    own_buffers,
    rules_of,
    states_of,
    weights_of,
)
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group
from ipu_dynamo.whole_step.saving.save import every_tensor

_HINT = "load a checkpoint of this model and optimizer"
_NONE: Mapping[str, Tensor] = MappingProxyType({})


def load_checkpoint(folder: Folder, step: CompiledModel) -> Any:
    """Let a training step go on from a checkpoint, and return the `extra` that is in it.

    If the step has no program yet, the model gets its parameters and buffers now, and the program
    takes the rest when it is compiled. All files are checked before, and nothing in them is run.

    Args:
        folder: what `save_checkpoint` returned; or the folder that it was given, for the latest.
        step: what `compile_training` returned.

    Raises:
        InputError: a name, shape, dtype or update of the step is another one; nothing is changed.
        SavedProgramError: a file is missing, or is not as it was written.
    """
    check_step(step)
    transport = ranks.transport_of(step.options)
    if transport is None:
        checkpoint = _read(folder, step)
    else:
        with transport.operation("mesh", "checkpoint", "a read of a checkpoint"):
            checkpoint = _read_together(folder, step, transport)
    if step.is_compiled:
        step.check_tensors()
        step.executable.between_calls(lambda: None)  # refuses to load within a call
    with torch.no_grad(), DeferredSignals(once=True):
        written: set[int] = set()
        if step.is_compiled:
            executable = step.executable
            weights = {name: checkpoint.tensors[name] for name in step.weights()}
            checkpoint.give(step.program, executable, step.groups, step.settled_counters, weights)
            step.say_states_are_newer()
            written = {executable.whole(name).data_ptr() for name in weights}
        for _, first, tensor, _ in every_tensor(step):
            if tensor.data_ptr() not in written:  # a later write would reach all replicas
                tensor.copy_(checkpoint.tensors[first])
    if not step.is_compiled:
        step.go_on_from(checkpoint)
    return checkpoint.head.extra


def _read(folder: Folder, step: CompiledModel) -> "_Checkpoint":
    path = Path(folder)
    if (path / LATEST).exists():
        path = latest_checkpoint(path) or path
    checkpoint = _Checkpoint(path, *read_checkpoint(path))
    checkpoint.check_weights(step)
    return checkpoint


def _read_together(folder: Folder, step: CompiledModel, transport: Transport) -> "_Checkpoint":
    """Read a checkpoint on this rank of a mesh, and compare it with that of the others."""
    made: list[_Checkpoint] = []

    def read() -> Any:
        made.append(_read(folder, step))
        path = made[0].path
        return f"{path.name}, {sha256((path / HEAD).read_bytes()).hexdigest()[:16]}"

    found = do_together(transport, "read a checkpoint", read)
    if len({*found}) > 1:
        raise RanksDiffer(
            "the ranks read different checkpoints",
            dict(enumerate(found)),
            hint="give all ranks the same folder, which all computers see",
        )
    return made[0]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint that was read, as a `CompiledModel` takes it when it is compiled."""

    path: Path
    head: CheckpointHead
    tensors: Mapping[str, Tensor]

    def check_weights(self, step: CompiledModel) -> None:
        """Raise InputError if the model's tensors have other names, shapes or dtypes."""
        states = {*self.head.states}
        names = [name for name in self.tensors if name not in states and REPLICA not in name]
        self._compare("model", weights_of(step)[0], {name: self.tensors[name] for name in names})

    def give(
        self,
        program: Program,
        executable: Executable,
        groups: Sequence[Group],
        settled: Mapping[str, int],
        weights: Mapping[str, Tensor] = _NONE,
    ) -> None:
        """Write states, buffers of each replica, and `weights` into a program.

        Args:
            settled: see `CompiledModel.settled_counters`.

        Raises:
            InputError: states or updates are others; nothing is written.
        """
        self._check_rules(rules_of(groups))
        values = {**weights, **self._states(program, executable, settled)}
        of_replicas = self._of_replicas(program, executable)
        executable.write(values)
        executable.write(of_replicas)  # after those of replica 0, which all replicas get
        executable.set_random_state(*self.head.random_state)

    def _states(
        self, program: Program, executable: Executable, settled: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """The values of the states of a program, by variable."""
        variables = states_of(program)
        saved = {name: torch.tensor(settled[name]) for name in settled.keys() & variables.keys()}
        saved |= {name: self.tensors[name] for name in self.head.states}
        held = {name: executable.whole(variable) for name, variable in variables.items()}
        self._compare("optimizer", held, saved)
        values: dict[str, Tensor] = {}
        for name, variable in variables.items():
            value = values.setdefault(variable, saved[name])
            if not _same_bits(value, saved[name]):  # a count of steps
                problem = f"{name} is {saved[name].tolist()} in {self.path}, and {value.tolist()} "
                problem += "for a parameter that is updated together with it here"
                raise InputError(problem, hint=_HINT)
        return values

    def _of_replicas(self, program: Program, executable: Executable) -> dict[str, Sequence[Tensor]]:
        """The values of buffers that differ between replicas, on the replicas of this process."""
        differing = sorted(name for name in self.tensors if REPLICA in name)
        if differing and self.head.replicas != program.replicas and not this_rank():
            warnings.warn(
                f"{differing[0].partition(REPLICA)[0]} and perhaps other buffers differ between "
                f"the {self.head.replicas} replicas of {self.path}; here {program.replicas} "
                "replicas begin with those of the first one",
                stacklevel=2,
            )
        if self.head.replicas != program.replicas:
            return {}
        names = {
            variable.name: [on_replica(variable.name, number) for number in executable.replicas.own]
            for variable in own_buffers(program)
            if variable.ipu in executable.ipus and on_replica(variable.name, 1) in self.tensors
        }
        return {name: [self.tensors[one] for one in of] for name, of in names.items()}

    def _check_rules(self, rules: Mapping[str, str]) -> None:
        for name in sorted(rules.keys() | self.head.rules.keys()):
            here, there = (by.get(name, "nothing") for by in (rules, self.head.rules))
            if here != there:
                problem = f"{name} is updated by {here}, and in {self.path} by {there}"
                raise InputError(problem, hint=_HINT)

    def _compare(self, what: str, held: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Raise InputError for tensors that are not those of the checkpoint."""
        for name in sorted(held.keys() | saved.keys()):
            if name not in saved:
                raise InputError(f"{self.path} has no {name}, and the {what} has", hint=_HINT)
            if name not in held:
                raise InputError(f"{self.path} has {name}, and the {what} has not", hint=_HINT)
            here, there = (
                f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
                for t in (held[name], saved[name])
            )
            if here != there:
                raise InputError(f"{name} is {here}, and {there} in {self.path}", hint=_HINT)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type have the same bits, which those of a NaN may be."""
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)

"""Save the state of a training step, and let a step go on from it."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import InputError, RanksDiffer
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import Program, Variable
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.program.ir.made_names import made_of
from ipu_dynamo.program.ir.update_rules import HostStep, TracedRule
from ipu_dynamo.program.share import Share
from ipu_dynamo.rank_number import this_rank
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.ranks.agreement import do_together
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.weights import check_tensor
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.checkpoints.checkpoint_files import (
    HEAD,
    LATEST,
    CheckpointFile,
    CheckpointHead,
    Folder,
    adding_checkpoint,
    latest_checkpoint,
    read_checkpoint,
    write_head,
    write_tensors,
)
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.optimizer.optimizer_sync import state_names
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group
from ipu_dynamo.whole_step.saving.save import every_tensor

_HINT = "load a checkpoint of this model and optimizer"
_REPLICA = made_of("", "replica")  # between a buffer's name and a number; no user's name has it
_NONE: Mapping[str, Tensor] = MappingProxyType({})


def save_checkpoint(folder: Folder, step: CompiledModel, extra: Any = None) -> Path:
    """Write the state of a training step into a new folder `checkpoint-NUMBER` in `folder`.

    It has the model's parameters and buffers, and the states of the optimiser, of the loss scale
    and of random numbers. It has neither the program nor the optimiser's numbers, such as the
    learning rate: the script makes them again. Once it is complete, `folder/latest` names it. A
    process that is killed before leaves the one before.

    Args:
        folder: the folder of all checkpoints of a training; it is made if it does not exist.
        step: what `compile_training` returned, once compiled.
        extra: other values that the script needs: None, bools, numbers, strings, lists and dicts
            of these. For instance the epoch, and the result of `scheduler.state_dict()`.

    Returns:
        The new folder.

    Raises:
        InputError: `extra` has something else, or `step` has no program, or does not train.
        SavedProgramError: something cannot be saved, which is named; nothing is written.
        UpdateError: an update failed, and weights and states were not written since.
        OSError: a file cannot be written; the latest checkpoint stays as it is.
    """
    _check_extra(extra, "extra")
    _check_step(step)
    if not step.is_compiled:
        problem = "the step has no program yet, and so no state of its optimizer"
        raise InputError(problem, hint="call it, or its `compile`, first")
    if any(isinstance(group.rule, HostStep) for group in step.groups):
        raise SavedProgramError(
            Reason.CANNOT_SAVE,
            'with update="host" the torch optimizer has the states',
            hint="save model.state_dict() and optimizer.state_dict(), or leave update out",
        )
    step.check_tensors()
    transport = ranks.transport_of(step.options)
    if transport is not None:
        with transport.operation("mesh", "checkpoint", "a write of a checkpoint"):
            return _save_together(folder, step, extra, transport)

    def save() -> Path:
        content = _Content(step, Share(1, 1, 0, 0))
        content.deal([content.digests()])
        with adding_checkpoint(folder) as (inner, path):
            file = write_tensors(inner, content.own, 0, 1)
            write_head(inner, content.head(extra), [file], content.weights)
        return path

    return step.executable.between_calls(save)


def _save_together(folder: Folder, step: CompiledModel, extra: Any, transport: Transport) -> Path:
    """Write a checkpoint on this rank of a mesh. Each rank writes the tensors that it is dealt."""
    share = transport.share
    step.executable.between_calls(lambda: None)  # refuses to save within a call
    step.read_weights()
    step.bring_states()
    made: list[_Content] = []

    def collect() -> Any:
        made.append(_Content(step, share))
        return made[0].digests()

    found = do_together(transport, "save its states", collect)
    content = made[0]
    content.deal(found)
    with ExitStack() as stack:

        def begin() -> Any:
            if share.rank == 0:
                return [*map(str, stack.enter_context(adding_checkpoint(folder)))]
            return None

        inner, path = map(Path, do_together(transport, "make a folder", begin)[0])

        def write() -> Any:
            return write_tensors(inner, content.own, share.rank, share.ranks)

        files = [CheckpointFile(*f) for f in do_together(transport, "write its file", write)]

        def complete() -> Any:
            if share.rank == 0:
                write_head(inner, content.head(extra), files, content.weights)
            stack.close()

        do_together(transport, "complete a checkpoint", complete)
    return path


class _Content:
    """The content of a checkpoint of a step, and the rank that writes each tensor of it.

    Args:
        share: the place of this rank.

    Attributes:
        own: the tensors that this rank writes.
        weights: for each name in the model's state, the rank that writes it, and its bytes.
    """

    def __init__(self, step: CompiledModel, share: Share) -> None:
        step.executable.check_update()
        self._step, self._share = step, share
        self._program = program = step.program
        executable = step.executable
        self._tensors, self._kept = _weights(step)
        states = {name: executable.whole(variable) for name, variable in _states(program).items()}
        for name, end in step.settled_counters.items():
            if name in states and states[name].item() == end:
                del states[name]  # a program that is compiled later does not have it
        if same := self._tensors.keys() & states.keys():
            problem = "it is the name of a tensor of the model and of a state"
            raise SavedProgramError(Reason.CANNOT_SAVE, problem, part=min(same))
        self._states = sorted(states)
        self._tensors |= states
        for name, tensor in self._tensors.items():
            check_tensor(name, tensor)
        numbers = executable.replicas.own
        self._buffers = {
            variable.name: {
                number: executable.tensor(variable.name, place)
                for place, number in enumerate(numbers)
            }
            for variable in _own_buffers(program)
            if variable.ipu in executable.ipus
        }
        self.own: dict[str, Tensor] = {}
        self.weights: dict[str, tuple[int, int]] = {}

    def digests(self) -> dict[str, list[str]]:
        """Digests of the buffers that this rank's replicas have for themselves."""
        return {
            name: [digest(tensor) for tensor in of.values()] for name, of in self._buffers.items()
        }

    def deal(self, digests: Sequence[Mapping[str, Sequence[str]]]) -> None:
        """Decide which tensors each rank writes.

        Args:
            digests: of all ranks.
        """
        share, program = self._share, self._program
        nbytes = {name: tensor.nbytes for name, tensor in self._tensors.items()}
        read = {variable.name for variable in program.variables}
        holders: dict[str, Sequence[int]] = dict.fromkeys(nbytes, range(share.ranks))
        holders |= {name: [0] for name in nbytes if name not in read and name not in self._states}
        found = dict(self._tensors)
        for variable in _own_buffers(program):
            name = variable.name
            holders[name] = share.of_rank(0).of_row
            if len({one for of in digests for one in of.get(name, ())}) > 1:
                for replica in range(1, program.replicas):
                    at = share.rank_of(replica, variable.ipu, program.replicas, program.num_ipus)
                    nbytes[_of(name, replica)], holders[_of(name, replica)] = nbytes[name], [at]
                    if at == share.rank:
                        found[_of(name, replica)] = self._buffers[name][replica]
        writers = dealt(nbytes, holders)
        own = [name for name, writer in writers.items() if writer == share.rank]
        self.own = {name: found[name].detach().contiguous() for name in own}
        self.weights = {name: (writers[name], nbytes[name]) for name in self._kept}

    def head(self, extra: Any) -> CheckpointHead:
        """All but the tensors."""
        return CheckpointHead(
            replicas=self._program.replicas,
            random_state=self._step.random_state,
            rules=_rules(self._step.groups),
            states=tuple(self._states),
            program=sha256(str(self._program).encode()).hexdigest(),
            extra=extra,
        )


def dealt(nbytes: Mapping[str, int], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The rank that writes each tensor: of those that hold it, one with the fewest bytes so far.

    Args:
        nbytes, holders: of each tensor, by its name; the same on all ranks.
    """
    writers, load = {}, Counter[int]()
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        writers[name] = min(holders[name], key=lambda rank: (load[rank], rank))
        load[writers[name]] += nbytes[name]
    return writers


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
    _check_step(step)
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
        names = [name for name in self.tensors if name not in states and _REPLICA not in name]
        self._compare("model", _weights(step)[0], {name: self.tensors[name] for name in names})

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
        self._check_rules(_rules(groups))
        values = {**weights, **self._states(program, executable, settled)}
        of_replicas = self._of_replicas(program, executable)
        executable.write(values)
        executable.write(of_replicas)  # after those of replica 0, which all replicas get
        executable.set_random_state(*self.head.random_state)

    def _states(
        self, program: Program, executable: Executable, settled: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """The values of the states of a program, by variable."""
        variables = _states(program)
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
        differing = sorted(name for name in self.tensors if _REPLICA in name)
        if differing and self.head.replicas != program.replicas and not this_rank():
            warnings.warn(
                f"{differing[0].partition(_REPLICA)[0]} and perhaps other buffers differ between "
                f"the {self.head.replicas} replicas of {self.path}; here {program.replicas} "
                "replicas begin with those of the first one",
                stacklevel=2,
            )
        if self.head.replicas != program.replicas:
            return {}
        names = {
            variable.name: [_of(variable.name, number) for number in executable.replicas.own]
            for variable in _own_buffers(program)
            if variable.ipu in executable.ipus and _of(variable.name, 1) in self.tensors
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


def _check_step(step: object) -> None:
    if not isinstance(step, CompiledModel):
        kind = f"{type(step).__module__}.{type(step).__qualname__}"
        raise InputError(f"a {kind} has no checkpoints", hint="pass what compile_training returned")
    if not step.training:
        hint = "save model.state_dict(), or train with compile_training"
        raise InputError("a program for inference has no checkpoints", hint=hint)


def _check_extra(value: object, where: str) -> None:
    """Raise InputError for a value that JSON would return as another one."""
    if value is None or type(value) in (bool, int, str):
        return
    if type(value) is float and isfinite(value):
        return
    if type(value) is list:
        for index, one in enumerate(value):
            _check_extra(one, f"{where}[{index}]")
    elif type(value) is dict and all(type(key) is str for key in value):
        for key, one in value.items():
            _check_extra(one, f"{where}[{key!r}]")
    else:
        shown = "a dict with keys other than strings" if type(value) is dict else repr(value)
        raise InputError(
            f"{where} is {shown}, which JSON has not",
            hint="use None, bools, finite numbers, strings, lists, and dicts with strings as keys",
        )


def _weights(step: CompiledModel) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a model, each under its first name, and the names that its state has."""
    tensors: dict[str, Tensor] = {}
    kept: list[str] = []
    for name, first, tensor, persistent in every_tensor(step):
        tensors.setdefault(first, tensor)
        if name == first and persistent:
            kept.append(name)
    if step.is_compiled and step.parts.own_weights:
        tensors |= {name: step.executable.whole(name) for name in step.weights()}
    return tensors, kept


def _own_buffers(program: Program) -> list[Variable]:
    """The buffers of which each replica has its own."""
    return [
        variable
        for variable in program.variables
        if variable.kind == "buffer" and not variable.replicated and variable.groups is None
    ]


def _states(program: Program) -> dict[str, str]:
    """The variables of all states, by their names in checkpoints, which are PyTorch's."""
    scale = {v.name: v.name for v in program.variables if v.kind == "loss_scale"}
    named = state_names(program).items()
    return scale | {f"{of}.{state}" if of else state: name for (of, state), name in named}


def _rules(groups: Iterable[Group]) -> dict[str, str]:
    """How each parameter is updated. Of traced rules the functions may differ: they are traced for
    numbers, and for the states that there are."""
    return {
        name: f"traced {rule.name}" if isinstance(rule, TracedRule) else str(rule)
        for rule, parameters in ((group.rule, group.parameters) for group in groups)
        for name in parameters
    }


def _of(name: str, replica: int) -> str:
    """The name of a buffer on a replica."""
    return f"{name}{_REPLICA}{replica}" if replica else name


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type have the same bits, which those of a NaN may be."""
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)

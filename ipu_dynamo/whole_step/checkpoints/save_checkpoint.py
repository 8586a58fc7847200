"""Save the state of a training step. The ranks of a mesh share the tensors out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from ipu_dynamo.errors import InputError
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.program.ir.update_rules import HostStep
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks.agreement import do_together
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.weights import check_tensor
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.checkpoints.checkpoint_files import (
    CheckpointFile,
    CheckpointHead,
    Folder,
    adding_checkpoint,
    write_head,
    write_tensors,
)
from ipu_dynamo.whole_step.checkpoints.checkpoint_parts import (
    check_step,
    on_replica,
    own_buffers,
    rules_of,
    states_of,
    weights_of,
)
from ipu_dynamo.whole_step.compiled_model import CompiledModel


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
    check_step(step)
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
        self._tensors, self._kept = weights_of(step)
        states = {name: executable.whole(variable) for name, variable in states_of(program).items()}
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
            for variable in own_buffers(program)
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
        for variable in own_buffers(program):
            name = variable.name
            holders[name] = share.of_rank(0).of_row
            if len({one for of in digests for one in of.get(name, ())}) > 1:
                for replica in range(1, program.replicas):
                    at = share.rank_of(replica, variable.ipu, program.replicas, program.num_ipus)
                    there = on_replica(name, replica)
                    nbytes[there], holders[there] = nbytes[name], [at]
                    if at == share.rank:
                        found[there] = self._buffers[name][replica]
        writers = dealt(nbytes, holders)
        own = [name for name, writer in writers.items() if writer == share.rank]
        self.own = {name: found[name].detach().contiguous() for name in own}
        self.weights = {name: (writers[name], nbytes[name]) for name in self._kept}

    def head(self, extra: Any) -> CheckpointHead:
        """All but the tensors."""
        return CheckpointHead(
            replicas=self._program.replicas,
            random_state=self._step.random_state,
            rules=rules_of(self._step.groups),
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

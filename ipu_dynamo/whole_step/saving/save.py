"""Write a compiled model into a file: its program, its tensors, and its state of training."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.swap import named_tensors
from ipu_dynamo.program import Program
from ipu_dynamo.program.ir.made_names import in_files
from ipu_dynamo.program.ir.update_rules import HostStep
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.saved.archive import Streamed, write_archive
from ipu_dynamo.saved.entry import Entry, SavedGroup, write_entry
from ipu_dynamo.saved.json_text import write_json
from ipu_dynamo.saved.operator_list import write_operators
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.tensors import TensorMember
from ipu_dynamo.saved.weights import Part, TensorTable
from ipu_dynamo.version import __version__
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.free_rows import FreeRows
from ipu_dynamo.whole_step.saving.decided import write_decided
from ipu_dynamo.whole_step.saving.loaded_model import LoadedModel
from ipu_dynamo.whole_step.weights.initial_state import updates

CORE = "core"  # which part of this package writes a file
ONLY = "program"  # the name of an entry point that has none
_ENTRY = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
Saved = CompiledModel | Mapping[str, CompiledModel]


def save(
    compiled: Saved, path: str | os.PathLike[str], *, free_rows: bool | Collection[str] = ()
) -> None:
    """Write what `compile_training` or `compile_inference` returned, once compiled, into a file.

    `ipu_dynamo.load` brings it up again, in any process, without the model's Python. The file has
    the program, weights, the optimiser's numbers and state, the state of random numbers, and this
    machine's decisions. Training goes on from it with the same bits as without a stop. It replaces
    a file of that name when it is complete.

    Args:
        compiled: one, or several by name, such as a step and its validation, which share weights
            in the file as they do here.
        path: of the file.
        free_rows: which of them, by name, are called with any number of rows after loading, as by
            `ipu_dynamo.free_rows`; True: all.

    Raises:
        CompileError: it is to have free rows, and a row of a result may depend on others.
        SavedProgramError: a part of it cannot be saved, which is named; nothing is written.
        OSError: the file cannot be written; one of that name stays as it was.
    """
    members, head = contents(compiled, free_rows=free_rows)
    write_archive(path, members, head | {"kind": CORE})


def contents(
    compiled: Saved, *, random_state: bool = True, free_rows: bool | Collection[str] = ()
) -> tuple[dict[str, bytes | Streamed], dict[str, Any]]:
    """The members of a saved program, and the head of its list; others may add their own.

    Args:
        random_state: with the seed and the step, so that random numbers go on.
        free_rows: see `save`.

    Raises:
        SavedProgramError: it cannot be saved.
    """
    entries = dict(compiled) if isinstance(compiled, Mapping) else {ONLY: compiled}
    if not entries or not all(_ENTRY.fullmatch(name) for name in entries):
        problem = f"entry points are named by letters, digits, _, . and -: {list(entries)}"
        raise SavedProgramError(Reason.CANNOT_SAVE, problem)
    for name, one in entries.items():
        _check(name, one)
    free = _free(entries, free_rows)
    saver = _Saver()
    members: dict[str, bytes | Streamed] = {}
    for name in sorted(entries):
        one = entries[name]
        entry = replace(saver.entry(one, random_state=random_state), free_rows=name in free)
        members[f"entries/{name}/program.txt"] = _text(one.program)
        for number, variant in enumerate(one.variants):
            members[f"entries/{name}/variant{number}.txt"] = _text(variant)
        members[f"entries/{name}/entry.json"] = write_json(write_entry(entry))
    programs = [program for one in entries.values() for program in (one.program, *one.variants)]
    members["operators.json"] = write_json(write_operators(programs))
    return members | saver.finish(), _head(sorted(entries))


def _free(entries: Mapping[str, CompiledModel], chosen: bool | Collection[str]) -> set[str]:
    """The entry points that are called with any number of rows; each is proven to allow it."""
    names = set(entries if chosen is True else chosen or ())
    if unknown := sorted(names - entries.keys()):
        problem = f"free_rows names {unknown[0]!r}, and the entry points are {', '.join(entries)}"
        raise SavedProgramError(Reason.CANNOT_SAVE, problem)
    names |= {name for name, one in entries.items() if isinstance(one, LoadedModel) and one.rows}
    for name in names:
        FreeRows(entries[name])
    return names


def _text(program: Program) -> bytes:
    try:
        return program.text().encode("ascii")
    except ValueError as error:
        raise SavedProgramError(Reason.CANNOT_SAVE, str(error)) from error


def _head(names: list[str]) -> dict[str, Any]:
    return {"ipu_dynamo": __version__, "torch": torch.__version__, "entries": names}


def _check(name: str, compiled: object) -> None:
    """Refuse an object that is no compiled model, or has nothing to save."""
    if not isinstance(compiled, CompiledModel):
        kind = type(compiled)
        hint = "save what compile_training or compile_inference returned"
        if kind.__module__.startswith("torch.") or hasattr(compiled, "_torchdynamo_orig_callable"):
            hint = "torch.compile(...).aot_compile(...) makes what can be saved of torch.compile"
        problem = f"{name} is a {kind.__module__}.{kind.__qualname__}"
        raise SavedProgramError(Reason.CANNOT_SAVE, problem, hint=hint)
    if compiled.options.mesh is not None:
        problem = f"{name} runs on {compiled.options.mesh.size()} ranks, and each has its share"
        hint = "load its state_dict into the model in one process, and compile and save it there"
        raise SavedProgramError(Reason.CANNOT_SAVE, problem, hint=hint)
    if not compiled.is_compiled:
        raise SavedProgramError(
            Reason.CANNOT_SAVE,
            f"{name} has no program yet",
            hint="call it, or its `compile`, first",
        )
    if any(isinstance(update.rule, HostStep) for update in updates(compiled.program)):
        problem = f'{name} has update="host": its update is Python'
        hint = 'save the model and the optimizer themselves, or compile without update="host"'
        raise SavedProgramError(Reason.CANNOT_SAVE, problem, hint=hint)
    compiled.executable.finish_compiling()  # the file has the decisions for compiled functions
    compiled.executable.check_update()


@dataclass
class _Saver:
    """Collects the tensors of entry points.

    Invariant: `names` has their names in `state_dict`, each once.
    """

    table: TensorTable = field(default_factory=TensorTable)
    names: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def entry(self, compiled: CompiledModel, *, random_state: bool) -> Entry:
        """The parts of a compiled model that are saved besides its program and tensors."""
        parts, executable = compiled.parts, compiled.executable
        _refuse_unread_anchors(executable)
        variables: dict[str, tuple[str, ...]] = {}
        for variable in compiled.program.variables:
            if variable.kind == "accumulator":
                continue  # zero between steps
            name = variable.name
            member: Part = "optimizer" if variable.kind in ("state", "loss_scale") else "weights"
            own = [executable.whole(name)]
            if not variable.replicated and variable.groups is None:
                own += [executable.tensor(name, r) for r in range(1, compiled.program.replicas)]
            key = name if member == "weights" else in_files(name)
            variables[name] = tuple(self.table.add(key, tensor, member) for tensor in own)
        self._name_all(compiled, {name: keys[0] for name, keys in variables.items()})
        return Entry(
            arguments=parts.arguments,
            results=parts.compiled.structure,
            input_names=parts.compiled.input_names,
            values=(parts.compiled.names, parts.compiled.gradients),
            anchors=parts.compiled.anchors,
            options=compiled.options,
            own_weights=parts.own_weights,
            groups=tuple(
                SavedGroup(group.rule, group.parameters, group.values) for group in compiled.groups
            ),
            variables=variables,
            seed=executable.seed if random_state else None,
            step=executable.step if random_state else 0,
            loss_scale=float(parts.compiled.loss_scale),
            devices=tuple(map(str, parts.compiled.devices)),
            variants=len(compiled.variants),
            decided=write_decided(
                parts.compiled.host.inlined.functions, parts.engine, parts.figures
            ),
        )

    def _name_all(self, compiled: CompiledModel, variables: Mapping[str, str]) -> None:
        """Note every name of every tensor of the model, also of those that no program reads."""
        for name, first, tensor, persistent in every_tensor(compiled):
            key = variables.get(first) or self.table.add(first, tensor, "weights")
            self._name(name, key, persistent)

    def _name(self, name: str, key: str, persistent: bool) -> None:
        if self.names.setdefault(name, (key, persistent))[0] != key:
            raise SavedProgramError(
                Reason.CANNOT_SAVE,
                f"{name} is another tensor in another entry point",
                part=name,
                hint="save models that share their weights, or each into a file of its own",
            )

    def finish(self) -> dict[str, bytes | Streamed]:
        """The members with the tensors, and with the table of their places."""
        tensors, views = self.table.finish()
        names = [[name, key, persistent] for name, (key, persistent) in self.names.items()]
        members: dict[str, bytes | Streamed] = {
            f"{part}.safetensors": TensorMember(held) for part, held in tensors.items()
        }
        return members | {"weights.json": write_json({"views": views, "names": names})}


def _refuse_unread_anchors(executable: Executable) -> None:
    """Refuse anchors of tensors that only the model has."""
    records = executable.records
    wanted = {} if records is None else records.wanted
    unread = {} if records is None else records.unread
    if short := next((s for s, anchor in wanted.items() if anchor.variable in unread), ""):
        problem = f"anchor {short} is of {wanted[short].variable}, which the program does not read"
        raise SavedProgramError(Reason.CANNOT_SAVE, problem, hint="leave the anchor out")


def every_tensor(compiled: CompiledModel) -> Iterator[tuple[str, str, Tensor, bool]]:
    """Parameters and buffers under every name that they have, in the order of `state_dict`.

    Yields the name, the tensor's first name, the tensor, and whether it is part of the state.
    """
    if isinstance(compiled, LoadedModel):
        names: dict[int, str] = {}
        for name, tensor, persistent in compiled.named_tensors():
            yield name, names.setdefault(id(tensor), name), tensor, persistent
    elif isinstance(compiled.model, nn.Module):
        first = {id(tensor): role.name for role, tensor in named_tensors(compiled.model)}
        for path, module in compiled.model.named_modules(remove_duplicate=False):
            begin = f"{path}." if path else ""
            for name, held in (*module._parameters.items(), *module._buffers.items()):
                if held is not None:
                    kept = name not in module._non_persistent_buffers_set
                    yield begin + name, first[id(held)], held, kept

"""Read a file that `save` wrote, and bring its programs up on this machine."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ipu_dynamo.errors import CompileError
from ipu_dynamo.memory_limit import enforce_memory
from ipu_dynamo.options import Engine, Options
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.pipeline import (
    form_passes,
    run_host_passes,
    update_recipe,
    with_update,
    writing_passes,
)
from ipu_dynamo.program import Program
from ipu_dynamo.progress import begin, job
from ipu_dynamo.runtime.engines.engines import make_engine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.saved.archive import Archive
from ipu_dynamo.saved.entry import Entry, read_entry
from ipu_dynamo.saved.form_4 import FORM_4, parse_form_4, variables_of
from ipu_dynamo.saved.json_text import expect, fields_of
from ipu_dynamo.saved.operator_list import check_operators, check_program
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.tensors import read_tensors
from ipu_dynamo.saved.weights import with_views
from ipu_dynamo.whole_step.anchored_values import UnknownValue
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade
from ipu_dynamo.whole_step.compile_model import Compiled, fused_again
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.free_rows import FreeRows
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group
from ipu_dynamo.whole_step.saving.check_entry import check_entry, check_tensors, check_variant
from ipu_dynamo.whole_step.saving.decided import read_decided
from ipu_dynamo.whole_step.saving.loaded_model import LoadedModel
from ipu_dynamo.whole_step.saving.save import CORE
from ipu_dynamo.whole_step.weights.initial_state import fresh_seed, new_accumulators
from ipu_dynamo.whole_step.worker_counts import workers_for

_LARGEST_TEXT = 1 << 28  # bytes of a program's text, or of a table
_MOST_ENTRIES = 1000
Names = Mapping[str, tuple[str, bool]]  # a tensor's name in the model -> its key, part of the state


def load(
    path: str | os.PathLike[str],
    entry: str | None = None,
    *,
    engine: Engine | None = None,
    workers: int | None = None,
) -> LoadedModel:
    """Bring up a program that `ipu_dynamo.save` wrote.

    It needs neither the model's Python nor an optimizer, and runs nothing of the file: it reads
    text, numbers and tensors, and compiles the program for this machine.

    Args:
        path: of the file.
        entry: which entry point, if the file has several; `load_entries` brings up all of them.
        engine: another one than the options say that were saved.
        workers: at most so many threads; None: as was saved.

    Raises:
        SavedProgramError: the file is refused, for a reason that it names.
        OutOfMemory: it does not fit on the IPUs that IPU_DYNAMO_ENFORCE_MEMORY names.
    """
    with Archive(path) as archive:
        names = entry_names(archive, CORE)
        if entry is None and len(names) > 1:
            problem = f"it has several entry points: {', '.join(names)}"
            hint = "load one of these by name, or all with load_entries"
            raise archive.refused(Reason.CONTENT, problem, hint=hint)
        chosen = names[0] if entry is None else entry
        if chosen not in names:
            problem = f"it has no entry point {chosen!r}, but {', '.join(names)}"
            raise archive.refused(Reason.CONTENT, problem)
        return read_models(archive, [chosen], engine=engine, workers=workers)[chosen]


def load_entries(
    path: str | os.PathLike[str], *, engine: Engine | None = None, workers: int | None = None
) -> dict[str, LoadedModel]:
    """Bring up all entry points of a saved program, by name; see `load`.

    They share the weights that they shared when they were saved.

    Args:
        path: of the file.
        engine: as for `load`.
        workers: as for `load`.
    """
    with Archive(path) as archive:
        names = entry_names(archive, CORE)
        return read_models(archive, names, engine=engine, workers=workers)


def entry_names(archive: Archive, kind: str, **more: type) -> list[str]:
    """The entry points of a file.

    Args:
        kind: which part of this package has to have written it.
        more: additional fields of its head, with their types.

    Raises:
        SavedProgramError: another one has.
    """
    with archive.part("manifest.json"):
        own = expect(archive.head.get("kind"), str, "its kind")
        if own != kind:
            hint = f"{own}.load reads it" if own == "poptorch" else "ipu_dynamo.load reads it"
            raise SavedProgramError(Reason.CLIENT, f"{own!r} wrote it, not {kind}", hint=hint)
        _, names, _, _, *_ = fields_of(
            archive.head, "the head", kind=str, entries=list, ipu_dynamo=str, torch=str, **more
        )
        for name in names:
            expect(name, str, "an entry point")
        if not 0 < len(names) <= _MOST_ENTRIES:
            raise SavedProgramError(Reason.LIMIT, f"it has {len(names)} entry points")
    return list(names)


def read_models(
    archive: Archive,
    names: Sequence[str],
    *,
    engine: Engine | None = None,
    workers: int | None = None,
) -> dict[str, LoadedModel]:
    """Entry points of a file, ready to run.

    Raises:
        SavedProgramError: the file is refused.
    """
    with job(f"loading {archive.path}"):
        begin("reading")
        return _read_models(archive, names, engine=engine, workers=workers)


def _read_models(
    archive: Archive, names: Sequence[str], *, engine: Engine | None, workers: int | None
) -> dict[str, LoadedModel]:
    with archive.part("operators.json"):
        operators = check_operators(archive.read_json("operators.json", _LARGEST_TEXT))
    entries = {name: _entry(archive, name, engine=engine, workers=workers) for name in names}
    tensors, table = _tensors(archive)
    placed, models = _Placed(tensors), {}
    for name, saved in entries.items():
        with archive.part(f"entries/{name}"):
            entry, program = _checked(archive, name, saved, tensors, operators)
            variants = [
                _program(archive, name, entry, tensors, operators, member=f"variant{number}")
                for number in range(entry.variants)
            ]
            for variant in variants:
                check_variant(entry, program, variant)
            try:
                models[name] = _bring_up(program, variants, entry, placed, table)
            except UnknownValue as error:
                raise SavedProgramError(Reason.CONTENT, str(error)) from error
    return models


def _entry(archive: Archive, name: str, *, engine: Engine | None, workers: int | None) -> Entry:
    part = f"entries/{name}/entry.json"
    written = archive.read_json(part, _LARGEST_TEXT)
    with archive.part(part):
        entry = read_entry(written)
    options = entry.options
    options = options if engine is None else replace(options, engine=engine)
    options = options if workers is None else replace(options, workers=workers)
    return replace(entry, options=options)


def _tensors(archive: Archive) -> tuple[dict[str, Tensor], Names]:
    """Every tensor of a file by key, and the names that the model has for some."""
    written = archive.read_json("weights.json", _LARGEST_TEXT)
    with archive.part("weights.json"):
        views, names = fields_of(written, "weights", views=dict, names=list)
    tensors = read_tensors(archive, "weights.safetensors")
    states = read_tensors(archive, "optimizer.safetensors")
    with archive.part("weights.json"):
        if twice := tensors.keys() & states.keys():
            raise SavedProgramError(Reason.CONTENT, f"{min(twice)} is there twice")
        tensors = with_views(tensors | states, views)
        table: dict[str, tuple[str, bool]] = {}
        for row in names:
            name, key, persistent = (
                row if type(row) is list and len(row) == 3 else (None, None, None)
            )
            if type(name) is not str or type(key) is not str or key not in tensors or name in table:
                raise SavedProgramError(Reason.CONTENT, f"{name} stands for no tensor")
            table[name] = key, expect(persistent, bool, "whether it is part of the state")
    return tensors, table


def _checked(
    archive: Archive,
    name: str,
    entry: Entry,
    tensors: Mapping[str, Tensor],
    operators: frozenset[str],
) -> tuple[Entry, Program]:
    """An entry and its program, which belong together, with names of today."""
    program = _program(archive, name, entry, tensors, operators)
    if archive.form == FORM_4:
        entry = replace(entry, variables=variables_of(entry.variables, program))
    check_entry(entry, program)
    check_tensors(entry, program, tensors)
    return entry, program


def _program(
    archive: Archive,
    name: str,
    entry: Entry,
    tensors: Mapping[str, Tensor],
    operators: frozenset[str],
    member: str = "program",
) -> Program:
    part = f"entries/{name}/{member}.txt"
    content = archive.read(part, _LARGEST_TEXT)
    with archive.part(part):
        constants = {
            variable: tensors[keys[0]]
            for variable, keys in entry.variables.items()
            if keys and keys[0] in tensors
        }
        try:
            parse = parse_form_4 if archive.form == FORM_4 else Program.parse
            program = parse(content.decode("ascii"), constants)
        except (ValueError, RecursionError) as error:
            raise SavedProgramError(Reason.CONTENT, str(error)) from error
        check_program(program, operators)
    return program


@dataclass(frozen=True)
class Opened:
    """An entry point of a file, checked, for a front end that has the model itself.

    Args:
        entry, program: what was saved.
        tensors: of the file, by key.
    """

    entry: Entry
    program: Program
    tensors: Mapping[str, Tensor]

    def ready(self) -> ReadyMade:
        """The program, for a model that is traced again."""
        options = self.entry.options
        engine = make_engine(options.stage_engine, options.check_compiled)
        devices = tuple(map(torch.device, self.entry.devices))
        return ReadyMade(
            host=run_host_passes(self.program, writing_passes(options, Machine(devices=devices))),
            constants={
                variable.name: self.tensors[self.entry.variables[variable.name][0]]
                for variable in self.program.variables
                if variable.kind == "constant"
            },
            input_names=self.entry.input_names,
            names=self.entry.values[0],
            gradients=self.entry.values[1],
            anchors=self.entry.anchors,
            figures=read_decided(self.entry.decided, engine),
        )

    def restore(self, core: CompiledModel, kinds: Collection[str]) -> None:
        """Copy variables of these kinds to a model that was compiled with `ready`."""
        core.executable.write(
            {
                variable.name: [self.tensors[key] for key in self.entry.variables[variable.name]]
                for variable in self.program.variables
                if variable.kind in kinds and variable.kind != "accumulator"
            }
        )


def open_entry(archive: Archive, name: str) -> Opened:
    """Read and check an entry point, without making anything of it.

    Raises:
        SavedProgramError: the file is refused.
    """
    with archive.part("operators.json"):
        operators = check_operators(archive.read_json("operators.json", _LARGEST_TEXT))
    entry = _entry(archive, name, engine=None, workers=None)
    tensors, _ = _tensors(archive)
    with archive.part(f"entries/{name}"):
        entry, program = _checked(archive, name, entry, tensors, operators)
    return Opened(entry, program, tensors)


@dataclass
class _Placed:
    """The tensors of a file on the devices of IPUs; equal keys on one device are one tensor."""

    tensors: Mapping[str, Tensor]
    placed: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def on(self, device: torch.device, key: str) -> Tensor:
        place = key, device
        if place not in self.placed:
            self.placed[place] = self.tensors[key].to(device)
        return self.placed[place]


def _bring_up(
    program: Program, variants: Sequence[Program], entry: Entry, placed: _Placed, table: Names
) -> LoadedModel:
    """The executable of a program, and what calls it."""
    options: Options = entry.options
    enforce_memory(program, None)
    try:
        devices = tuple(torch.device(name) for name in entry.devices)
        held = {
            variable.name: placed.on(devices[variable.ipu], entry.variables[variable.name][0])
            for variable in program.variables
            if variable.kind != "accumulator"
        }
    except (RuntimeError, AssertionError) as error:
        raise SavedProgramError(Reason.DEVICE, str(error)) from error
    engine = make_engine(options.stage_engine, options.check_compiled)
    figures = read_decided(entry.decided, engine)
    groups = [Group(group.rule, group.parameters, group.values) for group in entry.groups]
    machine = Machine(
        engine.name, devices, [group.values for group in groups], entry.own_weights, figures,
        constants=held,
    )  # fmt: skip
    written = run_host_passes(program, writing_passes(options, machine))
    host = run_host_passes(written, form_passes(options, machine))
    compiled = Compiled(
        machine=machine,
        host=host,
        written=written,
        structure=entry.results,
        tensors=held,
        roles={},
        input_names=entry.input_names,
        devices=devices,
        loss_scale=entry.loss_scale,
        costs=options.strategy.costs,
        names=entry.values[0],
        gradients=entry.values[1],
        anchors=entry.anchors,
    )
    executable = Executable(
        host,
        held | new_accumulators(compiled),
        engine,
        options.input_replica_groups.of(options.replicas),
        workers=workers_for(host, options),
        devices=devices,
        hyperparameters=machine.hyperparameters,
        fuse_again=partial(fused_again, written, options, machine),
        update_recipe=partial(update_recipe, options, machine),
        guard_updates=options.guard_updates,
        others=[with_update(variant) for variant in variants],
    )
    seed = fresh_seed(program) if entry.seed is None else entry.seed
    executable.set_random_state(seed, entry.step)
    for name, keys in entry.variables.items():
        for replica, key in enumerate(keys[1:], 1):
            executable.tensor(name, replica).copy_(placed.tensors[key])
    own = {entry.variables[name][0]: tensor for name, tensor in held.items()}
    loaded = LoadedModel(
        compiled,
        executable,
        options,
        entry.arguments,
        groups,
        own_weights=entry.own_weights,
        engine=engine,
        figures=figures,
        tensors={
            name: (own.get(key, placed.tensors[key]), persistent)
            for name, (key, persistent) in table.items()
        },
    )
    if entry.free_rows:
        try:
            loaded.rows = FreeRows(loaded)
        except CompileError as error:
            raise SavedProgramError(Reason.CONTENT, f"its rows are not free: {error}") from error
    return loaded

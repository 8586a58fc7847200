"""Compile a model: trace it, run the passes, get the program."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ipu_dynamo.capture.capture import Placeholder, Structure, Traced
from ipu_dynamo.capture.host_changes import changed_attributes
from ipu_dynamo.capture.outside import OutsideTensor
from ipu_dynamo.capture.swap import Model, named_tensors
from ipu_dynamo.capture.trace import Arguments, trace
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.library.host_call import KnownFunction
from ipu_dynamo.ops.private.graphs import code_on_demand
from ipu_dynamo.options import Costs, Options
from ipu_dynamo.options.devices import devices_of_ipus, devices_to_use
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.manager import PassManager, PassRun
from ipu_dynamo.passes.pipeline import (
    ANY_MACHINE,
    form_passes,
    lower,
    run_host_passes,
    whole_step,
    writing_passes,
)
from ipu_dynamo.passes.program.emit_update import UpdateGroup
from ipu_dynamo.passes.traced.stages.placement import pipeline_stages
from ipu_dynamo.profiling import recording
from ipu_dynamo.program import HostProgram, Program
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.progress import begin
from ipu_dynamo.rank_number import this_rank
from ipu_dynamo.whole_step.cache.program_cache import ProgramCache
from ipu_dynamo.whole_step.cache.program_key import program_key
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade, check_fit
from ipu_dynamo.whole_step.measured_costs import with_costs
from ipu_dynamo.whole_step.weights.grouped_weights import with_known_groups

log = logging.getLogger("ipu_dynamo.program")


@dataclass(frozen=True)
class Compiled:
    """A program, and its connections to the model that it was made from.

    Args:
        host: the program, in the form for this computer.
        written: the same before the form of a step was chosen: its functions write variables.
        machine: the one that the form was chosen for.
        structure: how the program's outputs make up the model's return value.
        tensors: the model's own tensors, by the name of the variable that they initialise.
        roles: of each variable and input, by name.
        input_names: the program's names of the caller's tensors, in order.
        devices: the torch device of every IPU.
        loss_scale: the first factor on the loss.
        costs: of operators, by which the strategy has cut the model, if it has.
        passes: a record of each pass that ran.
        host_changes: plain tensors of the model that forward changes in place, with the values that
            its one run gives them.
        outside: tensors of the user's that the trace took by their value.
        names: of the values that operators make.
        gradients: which of them, and of the parameters, have a gradient.
        anchors: the output stream of each anchor that is one.
        host_functions: the host functions that the program calls; this reference keeps them alive.
    """

    host: HostProgram
    written: HostProgram
    machine: Machine
    structure: Structure
    tensors: Mapping[str, Tensor]
    roles: Mapping[str, Placeholder]
    input_names: tuple[str, ...]
    devices: tuple[torch.device, ...]
    loss_scale: float
    costs: Costs = ()
    passes: tuple[PassRun, ...] = ()
    host_changes: Sequence[tuple[Tensor, Tensor]] = ()
    outside: Sequence[OutsideTensor] = ()
    names: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    anchors: Mapping[str, str] = field(default_factory=dict)
    host_functions: Sequence[KnownFunction] = ()

    @property
    def program(self) -> Program:
        """The work of every IPU."""
        return self.host.program


def compile_model(
    model: Model,
    example: Arguments,
    options: Options,
    groups: Sequence[UpdateGroup] = (),
    *,
    training: bool,
    loss: int | None = None,
    may_train_nothing: bool = False,
    ready: ReadyMade | None = None,
    machine: Machine = ANY_MACHINE,
) -> Compiled:
    """Trace `model` on one micro-batch and lower it.

    Args:
        example: one micro-batch of every input.
        groups: the optimiser's groups, when training.
        loss: index of the returned tensor to minimise; None: the value marked as the loss.
        may_train_nothing: accept a loss that depends on no parameter.
        ready: the program that it would become; then only those passes run that say how.
        machine: the one that runs it, without devices, which are those of the model.

    Raises:
        CompileError: the model cannot be compiled, or `ready` is of another one.
    """
    with code_on_demand():
        capture, options, devices = _captured(model, example, options, groups, training=training)
        host_changes = changed_attributes(capture)
        machine = replace(machine, devices=devices)
        if ready is not None:
            check_fit(ready, capture, groups)
            return _of_ready(ready, capture, options, machine, host_changes)
        options = _sharded_if_short(capture, options)
        options = with_costs(capture, options, loss=loss)
        wanted = LoweringInputs(groups, machine, training, loss, may_train_nothing)
        cache = ProgramCache.of(options)
        more = {"loss": loss, "may_train_nothing": may_train_nothing}
        key = program_key(capture, options, groups, devices, **more) if cache else None
        if cache is None or key is None:
            if cache is not None:
                log.info("the program is kept in no cache: Python or operators of others are in it")
            return _lowered(capture, options, wanted, host_changes)
        with cache.alone(key):
            passes = writing_passes(options, machine)
            if (cached := cache.find(key, partial(run_host_passes, passes=passes))) is not None:
                check_fit(cached, capture, groups)
                return _of_ready(cached, capture, options, machine, host_changes)
            compiled = _lowered(capture, options, wanted, host_changes)
            cache.keep(key, _to_keep(compiled))
            return compiled


def make_program(
    model: Model,
    example: Arguments,
    options: Options,
    groups: Sequence[UpdateGroup] = (),
    *,
    training: bool,
    loss: int | None = None,
    may_train_nothing: bool = False,
) -> Program:
    """The program that `compile_model` would make, for questions about it.

    A model on the meta device is traced as if it were on the CPU.

    Raises:
        CompileError: the model cannot be compiled.
    """
    with code_on_demand():
        captured = _captured(model, example, options, groups, training=training)
        capture, options = captured[:2]
        options = with_costs(capture, _sharded_if_short(capture, options), loss=loss)
        wanted = LoweringInputs(groups, ANY_MACHINE, training, loss, may_train_nothing)
        return _program(capture, options, wanted, PassManager(_level(wanted)))


def costs_of_model(
    model: Model,
    example: Arguments,
    options: Options,
    groups: Sequence[UpdateGroup] = (),
    *,
    training: bool,
    loss: int | None = None,
) -> Costs:
    """The costs of operators by which `compile_model` would cut a model."""
    with code_on_demand():
        capture, options, _ = _captured(model, example, options, groups, training=training)
        options = with_costs(capture, _sharded_if_short(capture, options), loss=loss)
    return options.strategy.costs


def _captured(
    model: Model,
    example: Arguments,
    options: Options,
    groups: Sequence[UpdateGroup],
    *,
    training: bool,
) -> tuple[Traced, Options, tuple[torch.device, ...]]:
    """Trace a model; also returns the options with facts of the model, and the IPUs' devices."""
    options = with_known_groups(model, options)
    devices = devices_to_use(
        options.device_names, [*(t for _, t in named_tensors(model)), *example.tensors]
    )
    devices = [torch.device("cpu") if d.type == "meta" else d for d in devices]
    if options.mesh is not None and devices[0].type != "cpu":
        raise CompileError(
            f"the model is on {devices[0]}, and ranks of a mesh run programs on CPUs",
            hint='move it with model.to("cpu"), or leave mesh out',
        )
    begin("tracing")
    with recording.span("tracing", "job"):
        capture = trace(
            model,
            example,
            training=training,
            mixed_precision=options.narrow,
            grouped=options.replica_groups,
            device=devices[0],
            module_names=options.module_names,
            norms_count=not options.narrow,
        )
    if training:
        _train_only(capture, {name for group in groups for name in group.parameters})
    return capture, options, tuple(devices)


@dataclass(frozen=True)
class LoweringInputs:
    """The inputs of the passes in addition to the options; see `compile_model`."""

    groups: Sequence[UpdateGroup]
    machine: Machine
    training: bool
    loss: int | None
    may_train_nothing: bool


def fused_again(
    written: HostProgram, options: Options, machine: Machine, hyperparameters: Hyperparameters
) -> HostProgram:
    """The program for other hyperparameters; a fused step leaves out terms that are zero.

    Args:
        written: as `Compiled` has it.
    """
    return run_host_passes(
        written, form_passes(options, replace(machine, hyperparameters=hyperparameters))
    )


def _lowered(
    capture: Traced,
    options: Options,
    wanted: LoweringInputs,
    host_changes: Sequence[tuple[Tensor, Tensor]],
) -> Compiled:
    """A traced model with the program that the passes make of it."""
    manager = PassManager(_level(wanted))
    program = _program(capture, options, wanted, manager)
    written = run_host_passes(program, writing_passes(options, wanted.machine), manager)
    machine = replace(wanted.machine, constants=capture.report.tensors)
    host = run_host_passes(written, form_passes(options, machine), manager)
    log.debug("%s", program)
    return Compiled(
        host=host,
        written=written,
        machine=machine,
        structure=capture.report.structure,
        tensors=capture.report.tensors,
        roles={role.name: role for role in capture.placeholders},
        input_names=tuple(role.name for role in capture.placeholders if role.kind == "input"),
        devices=devices_of_ipus(wanted.machine.devices, program.num_ipus),
        loss_scale=options.loss_scale,
        costs=options.strategy.costs,
        passes=tuple(manager.runs),
        host_changes=host_changes,
        outside=capture.report.outside,
        names=capture.report.names,
        gradients=capture.report.gradients,
        anchors=capture.report.anchors,
        host_functions=capture.report.host_functions,
    )


def _level(wanted: LoweringInputs) -> str:
    return "training" if wanted.training else "inference"


def _program(
    capture: Traced, options: Options, wanted: LoweringInputs, manager: PassManager
) -> Program:
    """The program that the passes make of a traced model."""
    passes = whole_step(
        options,
        training=wanted.training,
        loss=wanted.loss,
        groups=wanted.groups,
        may_train_nothing=wanted.may_train_nothing,
    )
    return lower(capture, passes, manager)


def _to_keep(compiled: Compiled) -> ReadyMade:
    """The parts of a compiled model that a cache keeps."""
    kinds = {variable.name: variable.kind for variable in compiled.program.variables}
    constants = {
        name: tensor.detach().cpu()
        for name, tensor in compiled.tensors.items()
        if kinds.get(name) == "constant"
    }
    return ReadyMade(
        compiled.written,
        constants,
        compiled.input_names,
        names=compiled.names,
        gradients=compiled.gradients,
        anchors=compiled.anchors,
    )


def _of_ready(
    ready: ReadyMade,
    capture: Traced,
    options: Options,
    machine: Machine,
    host_changes: Sequence[tuple[Tensor, Tensor]],
) -> Compiled:
    """A traced model with the program that it would become."""
    manager = PassManager("program", first="written")
    machine = replace(machine, constants=ready.constants)
    return Compiled(
        host=run_host_passes(ready.host, form_passes(options, machine), manager),
        written=ready.host,
        machine=machine,
        structure=capture.report.structure,
        tensors={**capture.report.tensors, **ready.constants},
        roles={role.name: role for role in capture.placeholders},
        input_names=ready.input_names,
        devices=devices_of_ipus(machine.devices, ready.host.program.num_ipus),
        loss_scale=options.loss_scale,
        costs=options.strategy.costs,
        host_changes=host_changes,
        outside=capture.report.outside,
        names=ready.names,
        gradients=ready.gradients,
        anchors=ready.anchors,
    )


def _train_only(capture: Traced, names: set[str]) -> None:
    """Leave out the gradients of parameters that the optimiser has not got."""
    capture.placeholders = tuple(
        replace(role, trainable=role.trainable and role.name in names)
        for role in capture.placeholders
    )


def _sharded_if_short(capture: Traced, options: Options) -> Options:
    """`options`, sharded if the strategy permits it and device iterations are too few.

    Args:
        capture: fresh from tracing; left as it is.
    """
    strategy, iterations = options.strategy, options.device_iterations
    if capture.training or not strategy.sharded_if_short:
        return options
    stages = pipeline_stages(capture.graph.graph, strategy)
    if iterations >= stages:
        return options
    log.log(
        logging.INFO if this_rank() else logging.WARNING,
        "a pipeline of %d stages cannot be filled with device_iterations=%d: the stages run one "
        "after the other (sharded), with the same results; inference_device_iterations=%d of an "
        "IPUConfig, or device_iterations=%d of options, makes a pipeline",
        stages,
        iterations,
        stages,
        stages,
    )
    changed = replace(strategy, kind="sharded", schedule="grouped", sharded_if_short=False)
    return replace(options, strategy=changed)

"""Make a program of a model, alone or together with the other ranks of a mesh, and bring it up.

The caller gets the program when it is complete; until then the program before is not changed.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ipu_dynamo.capture.private.tracing import unrecorded
from ipu_dynamo.capture.swap import Model, named_tensors
from ipu_dynamo.capture.trace import Arguments
from ipu_dynamo.memory_limit import enforce_memory
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.ops.private.thread_modes import KeptGradMode, recorded_casts_only
from ipu_dynamo.options import Costs, Options
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.pipeline import update_recipe, with_update
from ipu_dynamo.passes.program.emit_traced import WithoutGradient
from ipu_dynamo.program import HostProgram, Program
from ipu_dynamo.program.ir.collectives import Collective
from ipu_dynamo.program.schedule.dependencies import changed_by_replicas
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.engines.engines import EagerEngine, Engine, make_engine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.runtime.execute.step_form import FormInputs
from ipu_dynamo.runtime.ranks.agreement import value_of_first
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.agreement import (
    Facts,
    attempt,
    compare,
    complete_together,
    decide_together,
    take_weights,
)
from ipu_dynamo.whole_step.anchored_values import wanted_variables
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade
from ipu_dynamo.whole_step.calls.call_inputs import first_micro_batch
from ipu_dynamo.whole_step.compile_model import (
    Compiled,
    compile_model,
    costs_of_model,
    fused_again,
    make_program,
)
from ipu_dynamo.whole_step.optimizer.optimizer_sync import GroupsSnapshot, OptimizerLink
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group
from ipu_dynamo.whole_step.optimizer.traced_optimizer import extra_programs
from ipu_dynamo.whole_step.saving.decided import read_decided, write_decided
from ipu_dynamo.whole_step.weights import weights_elsewhere
from ipu_dynamo.whole_step.weights.initial_state import (
    fresh_seed,
    initial_tensors,
    updates,
)
from ipu_dynamo.whole_step.weights.weight_aliasing import (
    refuse_shared_memory,
    refuse_what_cannot_be_shared,
)
from ipu_dynamo.whole_step.worker_counts import workers_for


class LoweredModel(NamedTuple):
    """A program for a model, before anything runs it.

    Args:
        options: that it was compiled with.
        reading: of the optimiser.
        figures: those that `engine` decides by, if they are not this machine's.
        split: how calls split into micro-batches here.
    """

    compiled: Compiled
    options: Options
    reading: GroupsSnapshot
    engine: Engine
    figures: Figures | None
    machine: Machine
    split: Batching

    def seed(self) -> int:
        """The seed of the options, or a fresh one."""
        seed = self.options.seed
        return fresh_seed(self.compiled.program) if seed is None else seed

    @property
    def exchanges(self) -> bool:
        """Whether replicas exchange values within a micro-batch, or buffers after a call."""
        program = self.compiled.program
        collectives = any(isinstance(i, Collective) for i in program.walk())
        return collectives or bool(changed_by_replicas(program))

    @property
    def decided(self) -> dict[str, Any]:
        """The figures by which functions are compiled here, as JSON."""
        host = self.compiled.host
        functions = [f for f in host.inlined.functions if f.name in host.recipes]
        return write_decided(functions, self.engine, self.machine.figures)

    def facts(self, model: Model) -> Facts:
        """The facts that must be equal on all ranks."""
        engine = self.engine.name
        if engine == "inductor":  # the environment may say how functions are checked
            engine += f", check_compiled={self.engine.checks.check}"
        return Facts(engine, self.options, self.compiled.program, model, self.seed())


Made = TypeVar("Made")
Adopt = Callable[[LoweredModel, Executable, Transport | None], None]


@dataclass(frozen=True)
class Lowering:
    """Compile a model with these settings.

    Args:
        model, options: what to compile, and how.
        loss: index of the returned tensor to minimise; None: the value marked as the loss.
        link: to the optimiser that trains; None: nothing does.
        own_weights: the program computes on copies of the model's tensors.
        may_train_nothing: accept a loss that depends on no parameter.
        ready: the program that it becomes; then only those passes run that say how.
        engine: of the functions; None: that of the options.
        prepare: is called before the model is traced, when ranks have their common weights.
        resume: gives a program that was not called yet the state of a checkpoint.
    """

    model: Model
    options: Options
    loss: int | None
    link: OptimizerLink | None
    own_weights: bool
    may_train_nothing: bool
    ready: ReadyMade | None
    engine: Engine | None
    prepare: Callable[[], None]
    resume: Callable[[Program, Executable, Sequence[Group]], None]

    @property
    def training(self) -> bool:
        """Whether an optimiser updates the parameters."""
        return self.link is not None

    def program_for(self, given: Arguments, *, micro_batch: bool) -> Program:
        """The program of the machine for these arguments, which nothing is to run.

        Args:
            micro_batch: they are of one micro-batch, not of a call.
        """
        split = ranks.batching(self.options, None, training=self.training)
        making = partial(
            make_program,
            self.model,
            first_micro_batch(given, 1 if micro_batch else split.splits),
            self.options,
            training=self.training,
            loss=self.loss,
            may_train_nothing=self.may_train_nothing,
        )
        return self._with_groups(making, self._read_groups())[0]

    def lower(self, given: Arguments) -> LoweredModel:
        """Make the program for a call with these arguments, and decide how this computer would run
        all of it; no function is compiled."""
        return self._lower(given, self.options)

    def compile(self, given: Arguments, adopt: Adopt) -> None:
        """Compile on this rank; with other ranks of a mesh all take the new program, or none.

        Inference over replicas that exchange nothing is compiled by each rank for itself.

        Args:
            adopt: takes the program; it must not fail.
        """
        transport = ranks.transport_of(self.options)
        if transport is None:
            lowered = self._lower(given, self.options)
            adopt(lowered, self._bring_up(lowered, lowered.seed()), None)
        else:
            self._compile_together(given, transport, adopt)

    def _compile_together(self, given: Arguments, transport: Transport, adopt: Adopt) -> None:
        options, share, memory = self.options, transport.share, None
        text = f"the compilation of {model_name(self.model)}"
        operation = transport.operation("mesh", "compile", text)
        agrees = self.training or share.columns > 1
        with ExitStack() as stack:
            if agrees:
                stack.enter_context(operation)
                optimizer = self.link.optimizer if self.link and self.link.live else None
                measure = partial(self._costs, given, share)
                options, memory = decide_together(
                    transport, options, self.model, optimizer, measure
                )
            lowered, error = attempt(self._lower, given, options, share, memory)
            if lowered is not None and not agrees and lowered.exchanges:
                agrees = True
                stack.enter_context(operation)
            if agrees:
                self._agree(given, transport, lowered, error, adopt)
                return
        if lowered is None:
            assert error is not None
            raise error
        with compile_lock():
            executable = self._bring_up(lowered, lowered.seed(), transport)
            adopt(lowered, executable, transport)

    def _agree(
        self,
        given: Arguments,
        transport: Transport,
        lowered: LoweredModel | None,
        error: BaseException | None,
        adopt: Adopt,
    ) -> None:
        """Compare the program with those of other ranks, and bring it up, or raise on all."""
        facts = None if lowered is None else lowered.facts(self.model)
        seed = compare(transport, facts, error)["seed"]
        assert lowered is not None
        with KeptGradMode(), unrecorded():
            take_weights(transport, self.model)
        if transport.share.rows > 1:
            decided = value_of_first(transport, lowered.decided, "column")
            if decided != lowered.decided and (figures := read_decided(decided, lowered.engine)):
                of, memory = transport.share, lowered.machine.memory
                lower = partial(self._lower, given, lowered.options, of, memory)
                lowered, error = attempt(lower, figures)
        executable: Executable | None = None
        if lowered is not None:
            executable, error = attempt(self._bring_up, lowered, seed, transport)
        with DeferredSignals(once=True):  # all ranks take the new program, or none
            complete_together(transport, error)
            assert lowered is not None
            assert executable is not None
            with compile_lock():
                adopt(lowered, executable, transport)

    def _costs(self, given: Arguments, share: Share) -> Costs:
        """The costs of operators, by which the strategy cuts the model."""
        split = ranks.batching(self.options, share, training=self.training)
        return costs_of_model(
            self.model,
            first_micro_batch(given, split.splits),
            self.options,
            self.link.read().groups if self.link is not None else (),
            training=self.training,
            loss=self.loss,
        )

    def _lower(
        self,
        given: Arguments,
        options: Options,
        share: Share | None = None,
        memory: int | None = None,
        figures: Figures | None = None,
    ) -> LoweredModel:
        """Trace the model and run the passes; nothing of this object depends on it yet.

        Args:
            memory: bytes of the device's memory to decide by; None: of this machine.
            figures: to decide by; None: those of this machine.
        """
        self.prepare()
        transport = None if share is None else ranks.transport_of(options)
        tensors = {role.name: tensor for role, tensor in named_tensors(self.model)}
        weights_elsewhere.check_newest(tensors, transport, compiles=True)
        split = ranks.batching(options, share, training=self.training)
        example = first_micro_batch(given, split.splits)
        reading = self._read_groups()
        groups = reading.groups
        if figures is None and self.ready:
            figures = self.ready.figures
        engine = self.engine or make_engine(options.stage_engine, options.check_compiled)
        machine = Machine(
            engine.name,
            hyperparameters=[group.values for group in groups],
            own_tensors=self.own_weights,
            figures=figures,
            share=share,
            memory=memory,
        )
        compiling = partial(
            compile_model,
            self.model,
            example,
            options,
            training=self.training,
            loss=self.loss,
            may_train_nothing=self.may_train_nothing,
            ready=self.ready,
            machine=machine,
        )
        compiled, reading = self._with_groups(compiling, reading)
        enforce_memory(compiled.program, options.enforce_memory)
        link = self.link
        if share is not None:
            ranks.check_anchors(wanted_variables(compiled, options.anchors).keys(), share)
        if link is not None and link.traced is not None:
            link.traced.check_read([v.name for v in compiled.program.variables])
            compiled = replace(compiled, passes=(*link.traced.passes, *compiled.passes))
        (refuse_shared_memory if self.own_weights else refuse_what_cannot_be_shared)(compiled)
        return LoweredModel(compiled, options, reading, engine, figures, machine, split)

    def _read_groups(self) -> GroupsSnapshot:
        """The optimiser's groups as they are now; none without an optimiser."""
        if self.link is None:
            return GroupsSnapshot((), [])
        if self.link.traced is not None:
            self.link.traced.begin()
        return self.link.read()

    def _with_groups(
        self, make: Callable[[Sequence[Group]], Made], reading: GroupsSnapshot
    ) -> tuple[Made, GroupsSnapshot]:
        """Call `make` with the optimiser's groups; again without parameters that have no gradient.

        Returns:
            The result of `make`, and the groups that it was made with.
        """
        try:
            return make(reading.groups), reading
        except WithoutGradient as error:
            assert self.link is not None
            assert self.link.traced is not None
            self.link.traced.leave_out(error.names)  # known only after passes
            reading = self.link.read()
            return make(reading.groups), reading

    def _bring_up(
        self, lowered: LoweredModel, seed: int, transport: Transport | None = None
    ) -> Executable:
        """Compile the functions of a program; nothing of this object depends on it yet."""
        compiled, options, reading, engine, _, machine, split = lowered
        link, groups = self.link, reading.groups
        known, scale = link.known(reading) if link is not None else ({}, {})
        tensors = initial_tensors(compiled, known, private=self.own_weights, loss_scale=scale)
        with recorded_casts_only():
            executable = Executable(
                compiled.host,
                tensors,
                engine,
                split.group_of,
                seed=seed,
                workers=workers_for(compiled.host, options),
                devices=compiled.devices,
                hyperparameters=machine.hyperparameters,
                fuse_again=partial(fused_again, compiled.written, options, machine),
                guard_updates=options.guard_updates,
                update_recipe=partial(update_recipe, options, machine),
                others=self._other_updates(compiled, groups, machine),
                transport=transport,
                meanwhile=self._meanwhile(lowered),
            )
        if link is not None:
            executable.step_with(link.host(executable))
        if link is not None and link.traced is not None:
            executable.trace_with(
                lambda: with_update(link.trace_next(compiled.program, executable, options), machine)
            )
        self.resume(compiled.program, executable, groups)
        return executable

    def _meanwhile(self, lowered: LoweredModel) -> Callable[[], FormInputs] | None:
        """A function that makes the form of steps before functions are compiled.

        None: functions are compiled before the first step.

        It is the form that the eager engine would have.
        """
        compiled, options, ready = lowered.compiled, lowered.options, self.ready
        starts_now = options.starts_now  # asked always: a wrong variable is an error on any engine
        if ready is not None or lowered.engine.name == "eager" or not starts_now:
            return None
        machine = replace(compiled.machine, engine="eager")

        def form() -> FormInputs:
            fused = partial(fused_again, compiled.written, options, machine)
            host = fused(machine.hyperparameters)
            return FormInputs(
                host,
                EagerEngine(),
                workers_for(host, options),
                fused,
                partial(update_recipe, options, machine),
                self._other_updates(compiled, lowered.reading.groups, machine),
            )

        return form

    def _other_updates(
        self, compiled: Compiled, groups: Sequence[Group], machine: Machine
    ) -> list[HostProgram]:
        """Programs of the steps for which the optimiser's Python does something else."""
        traced = self.link.traced if self.link is not None else None
        if traced is None or not any(update.function for update in updates(compiled.program)):
            return []
        programs = extra_programs(compiled.program, traced, groups, self.options)
        return [with_update(program, machine) for program in programs]


def model_name(model: Model) -> str:
    """The name of a model in messages."""
    if isinstance(model, nn.Module):
        return str(model._get_name())
    return str(getattr(model, "__name__", type(model).__name__))

"""Run a model as a program: compile at the first call, feed it, exchange its weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.private.tracing import unrecorded
from ipu_dynamo.capture.swap import Model, named_tensors
from ipu_dynamo.capture.trace import Arguments, read_arguments
from ipu_dynamo.errors import InputError, skipping_sources
from ipu_dynamo.memory_limit import enforce_memory
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.ops.private.thread_modes import KeptGradMode, recorded_casts_only
from ipu_dynamo.options import Costs, Options
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.pipeline import update_recipe, with_update
from ipu_dynamo.passes.program.emit_traced import WithoutGradient
from ipu_dynamo.program import HostProgram, Program
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.ir.collectives import Collective
from ipu_dynamo.program.schedule.dependencies import changed_by_replicas
from ipu_dynamo.program.share import Share
from ipu_dynamo.program_history import remember
from ipu_dynamo.progress import compilation
from ipu_dynamo.runtime.engines.engines import Engine, make_engine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.runtime.execute.memory.step_records import StepRecords
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
from ipu_dynamo.whole_step.calls.call_inputs import CallInputs, first_micro_batch
from ipu_dynamo.whole_step.calls.call_signature import ExpectedArguments
from ipu_dynamo.whole_step.calls.synthetic_data import without_contents
from ipu_dynamo.whole_step.calls.unchanged_model import UnchangedModel
from ipu_dynamo.whole_step.compile_model import (
    Compiled,
    compile_model,
    costs_of_model,
    fused_again,
    make_program,
)
from ipu_dynamo.whole_step.compiled_state import not_compiled
from ipu_dynamo.whole_step.inspection import Inspection
from ipu_dynamo.whole_step.optimizer.optimizer_checkpoints import NewestState
from ipu_dynamo.whole_step.optimizer.optimizer_sync import (
    Describe,
    GroupsSnapshot,
    OptimizerLink,
    StatesSnapshot,
)
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group, describe
from ipu_dynamo.whole_step.optimizer.traced_optimizer import TracedOptimizer, extra_programs
from ipu_dynamo.whole_step.saving.decided import read_decided, write_decided
from ipu_dynamo.whole_step.step_settings import StepSettings
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
from ipu_dynamo.whole_step.weights.weight_exchange import WeightExchange
from ipu_dynamo.whole_step.worker_counts import workers_for


class _Lowered(NamedTuple):
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
        """What other ranks must have, too."""
        engine = self.engine.name
        if engine == "inductor":  # the environment may say how functions are checked
            engine += f", check_compiled={self.engine.checks.check}"
        return Facts(engine, self.options, self.compiled.program, model, self.seed())


Made = TypeVar("Made")
OnSend = Callable[[int, Any], object]  # a device iteration, and what it returns


class Parts(NamedTuple):
    """What a compiled model consists of, beside its executable.

    Args:
        arguments: of the call that it was compiled for, without the values of tensors.
        figures: those that `engine` decides by, if they are not this machine's.
        own_weights: the program computes on copies of the model's tensors.
    """

    compiled: Compiled
    arguments: Arguments
    engine: Engine
    figures: Figures | None
    own_weights: bool


class Resumed(Protocol):
    """Where a training step goes on from."""

    def give(
        self,
        program: Program,
        executable: Executable,
        groups: Sequence[Group],
        settled: Mapping[str, int],
    ) -> None:
        """Write states and random state into a program that nobody has called yet.

        Raises:
            InputError: they are not those of this program.
        """


class CompiledModel(Inspection, StepSettings, WeightExchange):
    """A model that runs as a program. Make it with `compile_training` or `compile_inference`.

    The first call compiles; the program is bound to the shapes, types and Python values of that
    call, and later calls must match them.

    Invariant: with `own_weights` the program computes on copies of the model's tensors, which
    `read_weights` and `write_weights` exchange; otherwise on the model's tensors themselves.

    Args:
        model, options: what to compile, and how.
        optimizer: what updates the parameters; None: nothing does, this is no training.
        loss: index of the returned tensor to minimise; None: the value marked as the loss.
        own_weights: compute on copies.
        describe: reads the optimiser's groups, given the model's parameters by name.
        live: follow the optimiser: its numbers before each call, and its state when compiling.
            Otherwise its numbers are read when compiling and by `set_optimizer` only.
        settings_stay: the modes of modules, which parameters need a gradient, and tensors that
            became constants are those of the time when it was compiled, whatever becomes of them.
            Otherwise a change is refused.
        may_train_nothing: accept a loss that depends on no parameter; then nothing is updated.
        ready: the program that the model would become; it is traced, and only those passes run that
            decide the form of a step here.
        traced: what `describe` traces, where it knows no rule.
    """

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        optimizer: torch.optim.Optimizer | None,
        loss: int | None = None,
        own_weights: bool = False,
        describe: Describe = describe,
        live: bool = True,
        settings_stay: bool = False,
        may_train_nothing: bool = False,
        ready: ReadyMade | None = None,
        traced: TracedOptimizer | None = None,
    ) -> None:
        self.model, self.options = model, options
        self.training = optimizer is not None
        self._loss, self._own_weights, self._settings_stay = loss, own_weights, settings_stay
        self._may_train_nothing, self._ready_made = may_train_nothing, ready
        self._link: OptimizerLink | None = None
        if optimizer is not None:
            self._link = OptimizerLink(optimizer, model, describe, live=live, traced=traced)
        self._expected: ExpectedArguments | None = None
        self._compiled: Compiled | None = None
        self._executable: Executable | None = None
        self._engine: Engine | None = None
        self._figures: Figures | None = None
        self._inputs: CallInputs | None = None
        self._watched: list[tuple[str, Tensor, int]] = []  # tensors that the program shares
        self._shared: dict[str, Tensor] = {}  # with this rank's part of the program
        # What calls change that the model shares, and the column of the mesh that has it.
        self._columns: list[tuple[Tensor, int]] = []
        self._unchanged: UnchangedModel | None = None
        self._anchored: dict[str, Tensor] = {}  # of the last complete call
        self._times = ""  # that compiling took
        self._state_to_write = False  # a write of the optimiser's state has begun, and not ended
        # Who has the newest state of the optimiser; None: it has no other steps than these.
        self.newest_state: NewestState | None = None
        self.checkpoint: Resumed | None = None  # which the program gets when it is compiled
        self._states_of_checkpoint: StatesSnapshot | None = None  # the optimiser's, when it was set
        self._loses_states = False  # the optimiser has later ones than the checkpoint

    def go_on_from(self, checkpoint: Resumed) -> None:
        """Take a checkpoint when the program is compiled."""
        self.checkpoint, self._states_of_checkpoint = checkpoint, self._training().snapshot()

    @property
    def has_newer_state(self) -> bool:
        """Whether the program has made steps that the torch optimiser knows nothing of."""
        return self._link is not None and self._link.has_newer_state

    def say_states_are_newer(self) -> None:
        """Say that the program's states were written, and are newer than the optimiser's."""
        self._state_to_write = False
        if self._link is not None:
            self._link.forget()
        if self.newest_state is not None:
            self.newest_state.step = self

    @property
    def parts(self) -> Parts:
        """What it consists of, once compiled, for whoever saves it."""
        compiled, _ = self._ready()
        assert self._engine is not None
        assert self._expected is not None
        return Parts(compiled, self._expected.first, self._engine, self._figures, self._own_weights)

    def anchored(self, name: str) -> Tensor:
        """What the anchor `name` of the options was in the last complete call.

        Raises:
            InputError: there is no such anchor, or no call yet.
        """
        if name not in self._anchored:
            known = ", ".join(self.options.anchors) or "none"
            raise InputError(f"there is no value of an anchor {name} yet; anchors: {known}")
        return self._anchored[name]

    def program_for(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, micro_batch: bool = False
    ) -> Program:
        """The program for these arguments; made and thrown away, unless there is one already.

        Args:
            args, kwargs: of a call; of a compiled model, none.
            micro_batch: they are of one micro-batch instead.

        Raises:
            CompileError: the model cannot be compiled.
            InputError: a compiled model gets arguments.
        """
        if self._compiled is not None:
            if args or kwargs:
                raise InputError("the model is compiled: its program needs no arguments")
            return self._compiled.program
        given = self._read(args, kwargs)
        split = ranks.batching(self.options, None, training=self.training)
        making = partial(
            make_program,
            self.model,
            first_micro_batch(given, 1 if micro_batch else split.splits),
            self.options,
            training=self.training,
            loss=self._loss,
            may_train_nothing=self._may_train_nothing,
        )
        with (
            compile_lock(),
            torch.inference_mode(False),
            skipping_sources(self.options.skipped_sources),
        ):
            return self._with_groups(making, self._read_groups())[0]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls with arguments like these; they are not run."""
        self._compile(self._read(args, kwargs))

    def __call__(self, *args: Any, on_send: OnSend | None = None, **kwargs: Any) -> Any:
        """Run one call: `device_iterations` steps, or micro-batches when not training.

        Args:
            args, kwargs: what the model's forward takes, with as many rows in each tensor as all
                micro-batches of the call have together.
            on_send: is called with the number of each device iteration, from 0, and with what the
                call would return if it were the only one; in order, on this thread, as soon as the
                iteration is complete: in training with its update. Of a pipeline others run
                meanwhile. What it raises ends the call behind that iteration: weights are those of
                the last complete update; in inference buffers are as before the call. It must not
                call this model, nor read its weights. Values that it writes count from the next
                update on; a fused step refuses weights, whose memory is the model's.

        Returns:
            What forward returns, with tensors joined by the output mode.
        """

        def tensors() -> Sequence[Tensor]:
            if self._expected is not None:
                return self._expected.tensors(args, kwargs)
            arguments = self._read(args, kwargs)
            self._compile(arguments)
            return arguments.tensors

        return self._run(tensors, on_send)

    def run(self, tensors: Sequence[Tensor], on_send: OnSend | None = None) -> Any:
        """Run one call of the compiled program, without comparing Python values.

        Args:
            tensors: those of the arguments, in the order in which flattening finds them.
            on_send: as in a call.
        """
        return self._run(lambda: tensors, on_send)

    def _run(self, make: Callable[[], Sequence[Tensor]], on_send: OnSend | None) -> Any:
        """Run one call, which fails on all ranks if it fails on one.

        Args:
            make: returns the tensors of the arguments, and compiles if nothing is compiled yet.
        """
        calls = 0 if self._executable is None else self._executable.calls_of_ranks
        try:
            tensors = make()
            inputs, compiled, executable = self._inputs, self._compiled, self._executable
            if on_send is not None and self.options.grid[1] > 1:
                raise InputError(
                    "on_send is called with each device iteration, and with a mesh of dimension "
                    "ipu a rank has results at the end of a call",
                    hint="leave on_send out, and use smaller calls",
                )
            if inputs is None or compiled is None or executable is None:
                raise not_compiled()
            self._check_model()
            if self.newest_state is not None:
                self.newest_state.give(self)
            if self._state_to_write:
                self.write_optimizer_state()
            hyperparameters = self._next_hyperparameters()
            fed = inputs.of(tensors, executable)
            if self._columns:
                transport = ranks.transport_of(self.options)
                assert transport is not None
                weights_elsewhere.will_change(transport, self._columns)
            with recorded_casts_only():
                sent = None if on_send is None else partial(self._sent, on_send)
                results = executable(fed, hyperparameters, sent)
        except BaseException as error:
            if self._executable is not None:  # ranks may wait for this one in the call
                self._executable.give_up(error, calls)
            raise
        if self.options.synthetic_data:
            results = without_contents(results)
        else:
            inputs.give_back(tensors, results)
        self._anchored = {short: results[stream] for short, stream in compiled.anchors.items()}
        if executable.records is not None:
            self._anchored |= executable.records.last
        return _returned(compiled, results)

    def _next_hyperparameters(self) -> Hyperparameters:
        """The hyperparameters of the steps that are about to run, for each group."""
        return self._link.before_step() if self._link is not None else ()

    def _sent(self, on_send: OnSend, iteration: int, results: dict[str, Tensor]) -> None:
        """Tell of an iteration."""
        results = without_contents(results) if self.options.synthetic_data else results
        compiled, _ = self._ready()
        on_send(iteration, _returned(compiled, results))

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the numbers of `optimizer` from the next call on, without compiling again.

        Raises:
            InputError: the update itself would differ: another rule, or other groups.
        """
        self._training().set(optimizer)

    @property
    def changed_mode(self) -> str | None:
        """What module is in another mode than when it was compiled, in words; None: all are in
        the mode that they had."""
        return self._unchanged.changed_mode() if self._unchanged is not None else None

    def _check_model(self) -> None:
        """Hold the model to what it was when it was compiled.

        Raises:
            InputError: a tensor or module was replaced, lies elsewhere, or has another setting.
        """
        assert self._unchanged is not None
        self._unchanged.check_tensors()
        weights_elsewhere.check_newest(self._shared, None, compiles=False)
        if not self._settings_stay:
            self._unchanged.check_mode()
            self._unchanged.check_outside()
            if self.training:
                self._unchanged.check_trainable()
        for name, tensor, address in self._watched:
            if tensor.data_ptr() != address:
                raise InputError(
                    f"{name} lies in other memory than when the program was compiled",
                    hint="change it in place (copy_, load_state_dict), or compile again",
                )

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        return read_arguments(self.model, args, kwargs)

    def _compile(self, given: Arguments) -> None:
        transport = ranks.transport_of(self.options)
        with (
            compile_lock() if transport is None else nullcontext(),
            torch.inference_mode(False),  # what is made outlives the call
            compilation(_name(self.model)) as times,
            skipping_sources(self.options.skipped_sources),
        ):
            if self._link is not None:
                if self.checkpoint is not None and self._states_of_checkpoint is not None:
                    now = self._link.snapshot()
                    self._loses_states = self._states_of_checkpoint.is_overwritten(now)
                if self.newest_state is not None:
                    self.newest_state.read()  # the new program goes on from there
                elif self._link.live and self._executable is not None:
                    self.read_optimizer_state()
            if transport is None:
                lowered = self._lower(given, self.options)
                self._adopt(given, lowered, self._bring_up(lowered, lowered.seed()), None)
            else:
                self._compile_together(given, transport)
        self._times = times()

    def _compile_together(self, given: Arguments, transport: Transport) -> None:
        """Compile on this rank of a mesh; see `agreement`.

        Inference over replicas that exchange nothing is compiled by each rank for itself.
        """
        options, share, memory = self.options, transport.share, None
        text = f"the compilation of {_name(self.model)}"
        operation = transport.operation("mesh", "compile", text)
        agrees = self.training or share.columns > 1
        with ExitStack() as stack:
            if agrees:
                stack.enter_context(operation)
                optimizer = self._link.optimizer if self._link and self._link.live else None
                measure = partial(self._costs, given, share)
                options, memory = decide_together(
                    transport, options, self.model, optimizer, measure
                )
            lowered, error = attempt(self._lower, given, options, share, memory)
            if lowered is not None and not agrees and lowered.exchanges:
                agrees = True
                stack.enter_context(operation)
            if agrees:
                self._agree(given, transport, lowered, error)
                return
        if lowered is None:
            assert error is not None
            raise error
        with compile_lock():
            executable = self._bring_up(lowered, lowered.seed(), transport)
            self._adopt(given, lowered, executable, transport)

    def _agree(
        self,
        given: Arguments,
        transport: Transport,
        lowered: _Lowered | None,
        error: BaseException | None,
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
                self._adopt(given, lowered, executable, transport)

    def _costs(self, given: Arguments, share: Share) -> Costs:
        """What operators take, by which the strategy cuts the model."""
        split = ranks.batching(self.options, share, training=self.training)
        return costs_of_model(
            self.model,
            first_micro_batch(given, split.splits),
            self.options,
            self._link.read().groups if self._link is not None else (),
            training=self.training,
            loss=self._loss,
        )

    def _lower(
        self,
        given: Arguments,
        options: Options,
        share: Share | None = None,
        memory: int | None = None,
        figures: Figures | None = None,
    ) -> _Lowered:
        """Trace the model and run the passes; nothing of this object depends on it yet.

        Args:
            memory: bytes of the device's memory to decide by; None: of this machine.
            figures: to decide by; None: those of this machine.
        """
        if self._loses_states:
            raise InputError(
                "the optimizer's state was written after load_checkpoint, whose states the program "
                "would take",
                hint="load the checkpoint last; or compile, then call write_optimizer_state",
            )
        if self._link is not None and self.checkpoint is not None:
            self._states_of_checkpoint = self._link.snapshot()  # with those of rank 0
        transport = None if share is None else ranks.transport_of(options)
        tensors = {role.name: tensor for role, tensor in named_tensors(self.model)}
        weights_elsewhere.check_newest(tensors, transport, compiles=True)
        split = ranks.batching(options, share, training=self.training)
        example = first_micro_batch(given, split.splits)
        reading = self._read_groups()
        groups = reading.groups
        if figures is None and self._ready_made:
            figures = self._ready_made.figures
        engine = self._engine or make_engine(options.stage_engine, options.check_compiled)
        machine = Machine(
            engine.name,
            hyperparameters=[group.values for group in groups],
            own_tensors=self._own_weights,
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
            loss=self._loss,
            may_train_nothing=self._may_train_nothing,
            ready=self._ready_made,
            machine=machine,
        )
        compiled, reading = self._with_groups(compiling, reading)
        enforce_memory(compiled.program, options.enforce_memory)
        link = self._link
        if share is not None:
            ranks.check_anchors(wanted_variables(compiled, options.anchors).keys(), share)
        if link is not None and link.traced is not None:
            link.traced.check_read([v.name for v in compiled.program.variables])
            compiled = replace(compiled, passes=(*link.traced.passes, *compiled.passes))
        (refuse_shared_memory if self._own_weights else refuse_what_cannot_be_shared)(compiled)
        return _Lowered(compiled, options, reading, engine, figures, machine, split)

    def _read_groups(self) -> GroupsSnapshot:
        """The optimiser's groups as they are now; none without an optimiser."""
        if self._link is None:
            return GroupsSnapshot((), [])
        if self._link.traced is not None:
            self._link.traced.begin()
        return self._link.read()

    def _with_groups(
        self, make: Callable[[Sequence[Group]], Made], reading: GroupsSnapshot
    ) -> tuple[Made, GroupsSnapshot]:
        """Make something with the optimiser's groups, of which those may stay that can be traced.

        Returns:
            What was made, and the groups that it was made with.
        """
        try:
            return make(reading.groups), reading
        except WithoutGradient as error:
            assert self._link is not None
            assert self._link.traced is not None
            self._link.traced.leave_out(error.names)  # known only now, where it counts
            reading = self._link.read()
            return make(reading.groups), reading

    def _bring_up(
        self, lowered: _Lowered, seed: int, transport: Transport | None = None
    ) -> Executable:
        """Compile the functions of a program; nothing of this object depends on it yet."""
        compiled, options, reading, engine, _, machine, split = lowered
        link, groups = self._link, reading.groups
        known, scale = link.known(reading) if link is not None else ({}, {})
        tensors = initial_tensors(compiled, known, private=self._own_weights, loss_scale=scale)
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
            )
        if link is not None:
            executable.step_with(link.host(executable))
        if link is not None and link.traced is not None:
            executable.trace_with(
                lambda: with_update(link.trace_next(compiled.program, executable, options), machine)
            )
        if self.checkpoint is not None:
            self.checkpoint.give(compiled.program, executable, groups, self.settled_counters)
        return executable

    def _adopt(
        self,
        given: Arguments,
        lowered: _Lowered,
        executable: Executable,
        transport: Transport | None,
    ) -> None:
        """Run this program from now on."""
        compiled = lowered.compiled
        held = {variable.name for variable in compiled.program.variables}
        self._watched = [
            (name, tensor, tensor.data_ptr())
            for name, tensor in compiled.tensors.items()
            if name in held and executable.whole(name).data_ptr() == tensor.data_ptr() != 0
        ]
        if self._link is not None:
            self._link.take(lowered.reading)
        self._unchanged, self._state_to_write = UnchangedModel(self.model, compiled.outside), False
        self._figures = lowered.figures
        self._take(compiled, executable, lowered.engine, ExpectedArguments(given))
        self._note_shared(transport)
        if self.newest_state is not None:
            self.newest_state.step = self
        if self.checkpoint is not None:
            self.say_states_are_newer()
            self.checkpoint = self._states_of_checkpoint = None

    def _take(
        self,
        compiled: Compiled,
        executable: Executable,
        engine: Engine,
        expected: ExpectedArguments,
    ) -> None:
        """Run this program in calls."""
        if wanted := wanted_variables(compiled, self.options.anchors):
            trains = compiled.program.kind == "training"
            steps = executable.batching.iterations if trains else 1
            held = {variable.name for variable in compiled.program.variables}
            unread = {n: t.detach() for n, t in compiled.tensors.items() if n not in held}
            executable.records = StepRecords(wanted, executable.batching, steps, unread)
        remember(
            compiled.host,
            lambda: executable.host_plan,
            lambda: executable.schedule_for(None),
        )
        warned = set() if self._inputs is None else self._inputs.warned
        self._inputs = CallInputs(compiled.program, compiled.input_names, self.options, warned)
        self._anchored = {}
        self._engine, self._expected = engine, expected
        self._compiled, self._executable = compiled, executable
        with KeptGradMode(), unrecorded():
            for tensor, value in compiled.host_changes:
                tensor.copy_(value)

    def _note_shared(self, transport: Transport | None) -> None:
        """Note which tensors the model and this rank's part of the program have in common."""
        compiled, executable = self._ready()
        shared = {} if self._own_weights else compiled.tensors
        ipus = {v.name: v.ipu for v in compiled.program.variables if v.name in shared}
        self._shared = {n: shared[n] for n, ipu in ipus.items() if ipu in executable.ipus}
        self._columns = []
        if transport is not None and transport.share.columns > 1:
            column_of = partial(transport.share.column_of, count=compiled.program.num_ipus)
            self._columns = [(shared[n], column_of(ipus[n])) for n in self.written & ipus.keys()]

    def _other_updates(
        self, compiled: Compiled, groups: Sequence[Group], machine: Machine
    ) -> list[HostProgram]:
        """Programs of the steps for which the optimiser's Python does something else."""
        traced = self._link.traced if self._link is not None else None
        if traced is None or not any(update.function for update in updates(compiled.program)):
            return []
        programs = extra_programs(compiled.program, traced, groups, self.options)
        return [with_update(program, machine) for program in programs]


def _returned(compiled: Compiled, results: Mapping[str, Tensor]) -> Any:
    """What forward returns, of the tensors of the output streams."""
    positions = map(str, range(len(compiled.structure.tensors)))
    return compiled.structure.rebuild([*map(results.__getitem__, positions)])


def _name(model: Model) -> str:
    """What a model is called, in messages."""
    if isinstance(model, nn.Module):
        return str(model._get_name())
    return str(getattr(model, "__name__", type(model).__name__))

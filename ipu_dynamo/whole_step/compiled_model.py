"""Run a model as a program: compile at the first call, feed it, exchange its weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from ipu_dynamo.capture.private.tracing import unrecorded
from ipu_dynamo.capture.swap import Model
from ipu_dynamo.capture.trace import Arguments, read_arguments
from ipu_dynamo.errors import InputError, IpuError, skipping_sources
from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.inspection.program_entry import HostEntry, ProgramEntry, tasks_of
from ipu_dynamo.noted_warnings import noting
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.ops.private.thread_modes import KeptGradMode, recorded_casts_only
from ipu_dynamo.options import Options
from ipu_dynamo.program import Program
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program_history import remember
from ipu_dynamo.progress import compilation, job
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.execute.memory.step_records import StepRecords
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.whole_step import ranks
from ipu_dynamo.whole_step.anchored_values import wanted_variables
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade
from ipu_dynamo.whole_step.calls.call_inputs import CallInputs
from ipu_dynamo.whole_step.calls.call_signature import ExpectedArguments
from ipu_dynamo.whole_step.calls.no_backward import attributes_of_others, trained_already
from ipu_dynamo.whole_step.calls.synthetic_data import without_contents
from ipu_dynamo.whole_step.calls.unchanged_model import UnchangedModel
from ipu_dynamo.whole_step.compile_model import Compiled
from ipu_dynamo.whole_step.compiled_state import not_compiled
from ipu_dynamo.whole_step.inspection import CompiledMembers
from ipu_dynamo.whole_step.lowering import LoweredModel, Lowering, model_name
from ipu_dynamo.whole_step.optimizer.optimizer_checkpoints import NewestState
from ipu_dynamo.whole_step.optimizer.optimizer_sync import (
    Describe,
    OptimizerLink,
    StatesSnapshot,
)
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group, describe
from ipu_dynamo.whole_step.optimizer.traced_optimizer import TracedOptimizer
from ipu_dynamo.whole_step.step_settings import StepSettings
from ipu_dynamo.whole_step.weights import weights_elsewhere
from ipu_dynamo.whole_step.weights.weight_exchange import WeightExchange

OnSend = Callable[[int, Any], object]  # a device iteration, and its result


class Parts(NamedTuple):
    """The parts of a compiled model, without its executable.

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
    """The checkpoint that a training step goes on from."""

    def give(
        self,
        program: Program,
        executable: Executable,
        groups: Sequence[Group],
        settled: Mapping[str, int],
    ) -> None:
        """Write states and random state into a program that was not called yet.

        Raises:
            InputError: they are not those of this program.
        """


class CompiledModel(CompiledMembers, StepSettings, WeightExchange):
    """A model that runs as a program. Make it with `compile_training` or `compile_inference`.

    The first call compiles; the program is bound to the shapes, types and Python values of that
    call, and later calls must match them.

    Invariant: with `own_weights` the program computes on copies of the model's tensors, which
    `read_weights` and `write_weights` exchange; otherwise on the model's tensors themselves.

    Args:
        model: the module or function to compile.
        options: of the program.
        optimizer: updates the parameters; None: the model is for inference.
        loss: index of the returned tensor to minimise; None: the value marked as the loss.
        own_weights: compute on copies.
        describe: reads the optimiser's groups, given the model's parameters by name.
        live: follow the optimiser: its numbers before each call, and its state when compiling.
            Otherwise its numbers are read when compiling and by `set_optimizer` only.
        settings_stay: later changes of modules' modes, of `requires_grad`, and of tensors that
            became constants have no effect. Otherwise such a change is refused.
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
        # The shared tensors that calls change, each with the column of the mesh that has it.
        self._columns: list[tuple[Tensor, int]] = []
        self._unchanged: UnchangedModel | None = None
        self._anchored: dict[str, Tensor] = {}  # of the last complete call
        self._times = ""  # that compiling took
        self._warned: tuple[str, ...] = ()  # by the last compilation
        self._state_to_write = False  # a write of the optimiser's state has begun, and not ended
        # Who has the newest state of the optimiser; None: it has no other steps than these.
        self.newest_state: NewestState | None = None
        self.checkpoint: Resumed | None = None  # which the program gets when it is compiled
        self._states_of_checkpoint: StatesSnapshot | None = None  # the optimiser's, when it was set
        self._loses_states = False  # the optimiser has later ones than the checkpoint

    def go_on_from(self, checkpoint: Resumed) -> None:
        """Take a checkpoint when the program is compiled.

        Args:
            checkpoint: the state that was read; the program gets it.
        """
        self.checkpoint, self._states_of_checkpoint = checkpoint, self._training().snapshot()

    @property
    def has_newer_state(self) -> bool:
        """Whether the program has made steps that are not yet in the torch optimiser's state."""
        return self._link is not None and self._link.has_newer_state

    def say_states_are_newer(self) -> None:
        """Say that the program's states were written, and are newer than the optimiser's."""
        self._state_to_write = False
        if self._link is not None:
            self._link.forget()
        if self.newest_state is not None:
            self.newest_state.step = self

    @property
    def _name(self) -> str:
        return model_name(self.model)

    @property
    def parts(self) -> Parts:
        """Its parts, once compiled; `save` reads them."""
        compiled, _ = self._ready()
        assert self._engine is not None
        assert self._expected is not None
        return Parts(compiled, self._expected.first, self._engine, self._figures, self._own_weights)

    def anchored(self, name: str) -> Tensor:
        """The value of the anchor `name` of the options in the last complete call.

        Args:
            name: of the anchor.

        Raises:
            InputError: the options have no anchor of this name, or there was no call yet.
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
            args: positional arguments of a call; of a compiled model, none.
            kwargs: keyword arguments of a call; of a compiled model, none.
            micro_batch: they are of one micro-batch instead.

        Raises:
            CompileError: the model cannot be compiled.
            InputError: a compiled model gets arguments.
        """
        if self._compiled is not None:
            if args or kwargs:
                raise InputError("the model is compiled: its program needs no arguments")
            return self._compiled.program
        with (
            compile_lock(),
            torch.inference_mode(False),
            skipping_sources(self.options.skipped_sources),
        ):
            given = self._read(args, kwargs)
            return self._lowering().program_for(given, micro_batch=micro_batch)

    def __ipu_explain__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inspection:
        """Inspect the model as it is compiled, or would be for these arguments.

        In the second case a program is made and thrown away, and no function is compiled.
        """
        if self.is_compiled:
            return self.__ipu_inspect__()
        with (
            compile_lock(),
            torch.inference_mode(False),
            compilation(model_name(self.model), show=self.options.progress) as times,
            noting() as warned,
            skipping_sources(self.options.skipped_sources),
        ):
            lowered = self._lowering().lower(self._read(args, kwargs)).compiled
        entry = ProgramEntry(lowered.program, HostEntry.lowered(lowered.host))
        return self._inspection((entry,), lowered.passes, warned, times())

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls with arguments like these; they are not run.

        All functions are compiled then, also with `start="now"`.

        Args:
            args: positional arguments, as in a call.
            kwargs: keyword arguments, as in a call.
        """
        with job(f"compiling {model_name(self.model)}", show=self.options.progress):
            self.prepare(*args, **kwargs)
            self.finish_compiling()

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Do the work of a first call with arguments like these, except its steps.

        With `start="now"` functions may not be compiled yet. Else it does what `compile` does.

        Args:
            args: positional arguments, as in a call.
            kwargs: keyword arguments, as in a call.
        """
        self._compile(self._read(args, kwargs))

    def finish_compiling(self) -> None:
        """Wait until compiled functions run the next steps, or cannot, with `start="now"`."""
        if self.executable.is_waiting:
            title = f"compiling {model_name(self.model)} in another process"
            with job(title, show=self.options.progress):
                self.executable.finish_compiling()

    def __call__(self, *args: Any, on_send: OnSend | None = None, **kwargs: Any) -> Any:
        """Run one call: `device_iterations` steps, or micro-batches when not training.

        Args:
            args: positional arguments of the model's forward. Each tensor has as many rows as all
                micro-batches of the call have together.
            on_send: is called with the number of each device iteration, from 0, and with the result
                that a call of this iteration alone would have. Calls are in order, on this thread,
                as soon as the iteration is complete: in training with its update. In a pipeline
                other iterations run meanwhile. An exception from it ends the call after that
                iteration: weights are those of the last complete update; in inference buffers are
                as before the call. It must not call this model, nor read its weights. Values that
                it writes count from the next update on; a fused step refuses weights, whose memory
                is the model's.
            kwargs: keyword arguments of the model's forward, with as many rows.

        Returns:
            The result of forward, with tensors joined by the output mode.
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
        return self._run(tensors, on_send)

    def _run(
        self, given: Sequence[Tensor] | Callable[[], Sequence[Tensor]], on_send: OnSend | None
    ) -> Any:
        """Run one call, which fails on all ranks if it fails on one.

        Args:
            given: the tensors of the arguments; or a function that returns them, and compiles if
                nothing is compiled yet.
        """
        calls = 0 if self._executable is None else self._executable.calls_of_ranks
        try:
            tensors = given() if callable(given) else given
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
        if self.training:
            for result in results.values():
                attributes = result.__dict__
                attributes["backward"] = trained_already
                attributes["__getstate__"] = partial(attributes_of_others, attributes)
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

        Args:
            optimizer: has the groups and parameters of the one before.

        Raises:
            InputError: the update itself would differ: another rule, or other groups.
        """
        self._training().set(optimizer)

    @property
    def changed_mode(self) -> str | None:
        """A text that names a module whose mode has changed since it was compiled; None: none."""
        return self._unchanged.changed_mode() if self._unchanged is not None else None

    def _check_model(self) -> None:
        """Check that the model is as it was when it was compiled.

        Raises:
            InputError: a tensor or module was replaced, moved, or has another setting.
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

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied: threads and compiled code belong to this process.

        Raises:
            IpuError: always.
        """
        raise IpuError(
            "a compiled model cannot be pickled or copied\n"
            "  try:  ipu_dynamo.save(step, path) for another process, ipu_dynamo.save_checkpoint "
            "to continue a training; or compile a copy of the model"
        )

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        return read_arguments(self.model, args, kwargs)

    def _compile(self, given: Arguments) -> None:
        transport = ranks.transport_of(self.options)
        with (
            compile_lock() if transport is None else nullcontext(),
            torch.inference_mode(False),  # its tensors outlive the call
            compilation(model_name(self.model), show=self.options.progress) as times,
            noting() as warned,
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
            self._lowering().compile(given, partial(self._adopt, given))
        self._times, self._warned = times(), tuple(warned)

    def _lowering(self) -> Lowering:
        return Lowering(
            self.model,
            self.options,
            loss=self._loss,
            link=self._link,
            own_weights=self._own_weights,
            may_train_nothing=self._may_train_nothing,
            ready=self._ready_made,
            engine=self._engine,
            prepare=self._prepare_states,
            resume=self._resume,
        )

    def _prepare_states(self) -> None:
        """Note which states of the optimiser the program begins with."""
        if self._loses_states:
            raise InputError(
                "the optimizer's state was written after load_checkpoint, whose states the program "
                "would take",
                hint="load the checkpoint last; or compile, then call write_optimizer_state",
            )
        if self._link is not None and self.checkpoint is not None:
            self._states_of_checkpoint = self._link.snapshot()  # with those of rank 0

    def _resume(self, program: Program, executable: Executable, groups: Sequence[Group]) -> None:
        """Give a new program the state of the checkpoint, if there is one."""
        if self.checkpoint is not None:
            self.checkpoint.give(program, executable, groups, self.settled_counters)

    def _adopt(
        self,
        given: Arguments,
        lowered: LoweredModel,
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
        if self.options.record == "timeline":
            executable.keep_timeline()
        remember(
            compiled.host,
            lambda: executable.host_plan,
            lambda: executable.ipu_schedule,
            lambda: HostEntry.of(executable).memory_or_reason,
        )
        executable.followed = lambda: tasks_of(executable)
        if self._executable is not None:
            self._executable.stop_compiling()
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


def _returned(compiled: Compiled, results: Mapping[str, Tensor]) -> Any:
    """Build the result of forward from the tensors of the output streams."""
    positions = map(str, range(len(compiled.structure.tensors)))
    return compiled.structure.rebuild([*map(results.__getitem__, positions)])

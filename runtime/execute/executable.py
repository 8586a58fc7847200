"""Run a program on this machine, each IPU on its torch device."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.ops.private.locks import caller, fork_safe_lock
from ipu_dynamo.ops.private.thread_modes import KeptGradMode
from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.private.profiler import ProfilerRow, profiler_runs
from ipu_dynamo.profiling.recording import Recording
from ipu_dynamo.program import Decision, Function, HostProgram, Program, TensorType
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.ir.verify.program import verify
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.engines.pending_code import EngineFailed, OnlyHere
from ipu_dynamo.runtime.execute.bound_form import (
    BoundForm,
    Surroundings,
    bind_form,
    schedule_here,
)
from ipu_dynamo.runtime.execute.call_timeline import CallTimeline, TaskBytes
from ipu_dynamo.runtime.execute.fused_step import FuseAgain
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.runtime.execute.host_io.host_streams import HostLink, HostStreams
from ipu_dynamo.runtime.execute.host_io.print_queue import PrintQueue
from ipu_dynamo.runtime.execute.host_io.transfer_times import TransferTimes
from ipu_dynamo.runtime.execute.later_form import LaterForm
from ipu_dynamo.runtime.execute.memory.step_records import StepRecords
from ipu_dynamo.runtime.execute.memory.storage import Storage, Values
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.observer import Observer, joined
from ipu_dynamo.runtime.execute.step_form import FormInputs, StepForm
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.runtime.execute.transaction.rank_vote import RankCall
from ipu_dynamo.runtime.execute.transaction.update_runs import UpdateRecipe
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.runtime.update.host_update import HostStepper

log = logging.getLogger(__name__)
T = TypeVar("T")
Sent = Callable[[int, dict[str, Tensor]], None]  # a device iteration, and its results by stream
START, COMPILED, EAGER = "start", "compiled functions", "operator by operator"  # of a decision


class Iterations(Observer):
    """Hands the results of each device iteration of a call to a function, in its grad mode."""

    def __init__(self, link: HostLink, sent: Sent) -> None:
        self._link, self._sent = link, sent
        self._gradients = torch.is_grad_enabled()

    def iteration_ended(self, streams: HostStreams, iteration: int) -> None:
        results = self._link.of_iteration(streams, iteration)
        with torch.set_grad_enabled(self._gradients):
            self._sent(iteration, results)


class Executable:
    """A program bound to the tensors of its variables.

    Invariant: variables are read and written in the tensors given at construction; between calls
    accumulators of several micro-batches are zero, and no value of a micro-batch is held. One
    call at a time may run. The next call first puts back or writes the rest if an interrupted
    call could not, and so does `whole`.

    Args:
        host: the program to run, as often as its loops say.
        tensors: for every variable, the tensor that holds it on the first replica here; with a
            leading dimension over groups of replicas, where it has those. Replicated variables are
            shared by the replicas of all groups, or of theirs; the others are copied for each.
        engine: makes callables of the program's functions.
        group_of: for each replica here, the input group that it reads; empty: its own.
        seed: of the random streams, which `seed` and `step` determine.
        workers: the largest number of threads; None is one for each IPU of every replica. One
            worker runs the micro-batches one after the other.
        devices: the torch device of every IPU, where the tensors of its variables are.
        hyperparameters: probable ones of the calls; the functions for them are compiled now.
        fuse_again: fuses the step anew if other hyperparameters are zero than those that `host` was
            specialised for.
        guard_updates: keep copies of the tensors that updates write, until these are complete.
        update_recipe: see `LoopedStep`.
        transport: to the other ranks; `host` has the share of this one.
        others: the same with updates that were traced for other hyperparameters.
        meanwhile: makes a form that runs the steps while another process compiles the functions of
            `host`; None: the functions are compiled now. It may not be called.

    Attributes:
        program: the instructions of every IPU.
        replicas: those that run here. Places of replicas are places among these.
        batching: how the caller's tensors split into the micro-batches of the program's loops.
        step: device iterations completed since the seed was set, over all calls.
        schedule: the actions of each worker, in order.
        timeline, records, transfers: set them to record the times of tasks, values of variables in
            the steps of a call, and the times of transfers; nothing else changes.
        followed: finds the memory of this computer around each task, for traces; None: nobody does.
        memory: the values that the IPUs keep off the chip, and the bytes moved there and back.
        fused: runs a step and its update as one function; None if these are apart.
    """

    def __init__(
        self,
        host: HostProgram,
        tensors: Mapping[str, Tensor],
        engine: Engine,
        group_of: Sequence[int] = (),
        seed: int = 0,
        workers: int | None = 1,
        devices: Sequence[torch.device] = (),
        hyperparameters: Hyperparameters = (),
        fuse_again: FuseAgain | None = None,
        guard_updates: bool = False,
        update_recipe: UpdateRecipe | None = None,
        others: Sequence[HostProgram] = (),
        transport: Transport | None = None,
        meanwhile: Callable[[], FormInputs] | None = None,
    ) -> None:
        verify(host.program)
        assert host.share == (None if transport is None else transport.share)
        self.program, self.replicas = host.program, host.replicas
        self.batching = Batching.of(host.inlined, len(self.replicas.own), group_of)
        self.devices = tuple(devices) or (torch.device("cpu"),) * host.inlined.num_ipus
        self.seed = seed
        self._first_step = 0  # counted before the first step of this executable
        self.timeline: Timeline | None = None
        self.transfers: TransferTimes | None = None
        self.records: StepRecords | None = None
        self.followed: Callable[[], Sequence[TaskBytes]] | None = None
        # what it found for the form that runs, once it was asked
        self._task_bytes: Sequence[TaskBytes] | None = None
        self.memory = StreamingMemory()
        self._storage = Storage(host.runs, tensors, self.replicas)
        self._rounds = sections(host.runs).steps
        self._common = Surroundings(
            self._storage, self.batching, self.devices, self.memory, guard_updates, transport
        )
        self._another: Callable[[], HostProgram] | None = None
        self._stepper: HostStepper | None = None
        inputs = FormInputs(host, engine, workers, fuse_again, update_recipe, others)
        self._later: LaterForm | None = None
        self._start: Decision | None = None  # how steps begin, if not with compiled functions
        if meanwhile is not None:
            self._begin_to_compile(inputs, hyperparameters)
            inputs = inputs if self._later is None else meanwhile()
        self._use(bind_form(inputs, self._common, hyperparameters))
        self._one_call = fork_safe_lock()
        # While the lock is taken: whether by a call, and the threads that have it or wait for it.
        self._calls, self._inside = False, set[int]()

    def keep_timeline(self) -> None:
        """Record all that each call does from now on; `timeline` has it of the last call."""
        self.timeline = self._call_timeline()

    def _call_timeline(self, to: Sequence[Recording] = ()) -> CallTimeline:
        form = self._form

        def followed() -> Sequence[TaskBytes]:
            if form is not self._form or self.followed is None:
                return ()
            if self._task_bytes is None:
                self._task_bytes = self.followed()
            return self._task_bytes

        return CallTimeline(self._host.runs, replicas=self.replicas.own, to=to, followed=followed)

    @property
    def host_program(self) -> HostProgram:
        """Return the host's part of the program; its text has every decision and its reason."""
        return replace(self._host, plan=self.host_plan)

    @property
    def host_plan(self) -> HostPlan:
        """How a step runs here."""
        plan = self._form.plan()
        if self._start is None:
            return plan
        return replace(plan, decisions=(self._start, *plan.decisions))

    @property
    def step(self) -> int:
        """Device iterations completed since the seed was set, over all calls."""
        return self._first_step + self._commit.steps

    def set_random_state(self, seed: int, step: int) -> None:
        """Draw the numbers from the next call on that belong to `step` of `seed`."""
        self._settle_alone()
        self.seed, self._first_step = seed, step - self._commit.steps

    @property
    def ipu_schedule(self) -> Schedule:
        """The schedule of each IPU of every replica, with all recomputation of an IPU."""
        return schedule_here(self.program, self._host, None)

    def failed_check(self, function: Function) -> bool:
        """Whether a function was compiled wrong, so that it runs operator by operator."""
        return self._engine.checks.fails(function)

    def _use(self, bound: BoundForm) -> None:
        """Run steps in this form from now on. A step is complete, or it is the first form."""
        self._host, self._engine = bound.inputs.host, bound.inputs.engine
        self.schedule, self._link = bound.schedule, bound.link
        self.fused, self._looped = bound.fused, bound.looped
        self._ranks, self._row = bound.streams, bound.row
        self._form: StepForm = bound.form
        self._task_bytes = None
        self._commit = bound.form.commit
        self._storage.rewritten = bound.form.commit.rewritten

    def _begin_to_compile(self, inputs: FormInputs, hyperparameters: Hyperparameters) -> None:
        """Let another process compile the functions of a form, if that is possible and needed."""
        try:
            later = LaterForm(inputs, self._common, hyperparameters)
        except OnlyHere as error:
            log.warning("the first step waits until functions are compiled: %s", error)
            self._start = Decision(START, COMPILED, f"from the first step on; {error}")
            return
        if later.waits:
            self._later = later
            reason = "from the first step on; compiled functions follow at the beginning of a call"
            self._start = Decision(START, EAGER, reason)
        else:
            reason = "from the first step on; there was nothing to compile"
            self._start = Decision(START, COMPILED, reason)

    def _take_over(self, hyperparameters: Hyperparameters = ()) -> None:
        """Let compiled functions run the next steps, if they are waited for and there.

        If they cannot be compiled, a warning says so, and the form that runs goes on for good.

        Args:
            hyperparameters: of the next steps; empty: they are not known.
        """
        if (later := self._later) is None:  # another thread was first
            return
        self._commit.check()  # else the form that noticed a failed update has to go on
        try:
            old = self._looped
            others = [] if old is None else [variant.host for variant in old.variants.all[1:]]
            bound = later.bound(hyperparameters, others)
        except EngineFailed as error:
            self._later, reason = None, f"from the first step on; the engine failed: {error}"
            self._start = Decision(START, EAGER, reason.partition("\n")[0])
            log.warning("steps run operator by operator, as the engine failed:\n%s", error)
            return
        if bound is None:
            return
        with DeferredSignals():
            first = self.step
            self._first_step += self._commit.steps
            self._use(bound)
            if isinstance(self.timeline, CallTimeline):
                self.keep_timeline()  # of the program that runs
            if self._looped is not None:
                self._looped.another = self._another or self._looped.another
                self._looped.host = self._stepper or self._looped.host
                if old is not None:
                    self._looped.go_on_from(old)
            self._later, reason = None, f"from step {first} on; operator by operator before it"
            self._start = Decision(START, COMPILED, reason)

    @property
    def is_waiting(self) -> bool:
        """Whether another process compiles the functions of later steps; see `meanwhile`."""
        return self._later is not None

    def stop_compiling(self) -> None:
        """End the process that compiles functions for it; the form that runs goes on for good."""
        if self._later is not None:
            self._later.stop()
            self._later = None

    def finish_compiling(self) -> None:
        """Wait until compiled functions run the next steps, or cannot; see `meanwhile`.

        Raises:
            IpuError: this thread is within a call.
        """
        while (later := self._later) is not None:
            later.wait()
            self.between_calls(self._take_over)

    @property
    def ipus(self) -> range:
        """The IPUs that run here."""
        return self._host.ipus

    def tensor(self, name: str, replica: int = 0) -> Tensor:
        """The tensor that holds a variable on a replica, by its place among those here."""
        return self._storage.tensor(name, replica)

    def whole(self, name: str) -> Tensor:
        """Return the tensor of a variable on all groups of replicas.

        It has a leading dimension over groups. Without groups it is the first replica's tensor.
        """
        self._settle_alone()
        return self._storage.stored_tensor(name)

    def read_row(self, names: Collection[str]) -> None:
        """Bring the values of variables on other ranks' IPUs into their tensors here.

        All ranks of a row call this together, with the same names. In one process it does nothing.
        """
        if self._ranks is None or self._row is None:
            return
        ranks, ipus = self._ranks, self._host.ipus

        def read() -> None:
            self._settle()
            variables = [v for v in self.program.variables if v.name in names]
            tensors = {v.name: self._storage.stored_tensor(v.name) for v in variables}
            own = {v.name: tensors[v.name] for v in variables if v.ipu in ipus}
            types = [(v.name, v.ipu, TensorType.of(tensors[v.name])) for v in variables]
            with torch.no_grad():
                for name, value in ranks.give_row(own, types).items():
                    if name not in own:
                        tensors[name].copy_(value)

        assert self._looped is not None
        assert self._looped.ranks is not None
        with self._looped.ranks.reading():
            self._alone(read)

    def _settle_alone(self) -> None:
        """Complete an interrupted call, unless one is running."""
        if not self._one_call.locked():
            self._alone(self._settle)

    def _settle(self) -> None:
        """Complete an interrupted call: undo or finish its step, and write waiting values."""
        if not self._commit.settled:
            with self._commit.signals:
                self._commit.settle()
        self._storage.keep_writes(unless_known=True)
        if self._storage.waiting:
            self._storage.write_waiting()

    def check_update(self) -> None:
        """Raise while variables of a failed update have not been written again.

        Raises:
            UpdateError: there are some; it names them.
        """
        self._settle_alone()
        self._commit.check()

    def write(self, values: Values) -> None:
        """Overwrite variables from outside of a step, on any thread.

        If another thread runs a call, wait for its end. Within a call, on its own thread or on one
        of its workers, the values are copied, and are used from the next step on.

        Args:
            values: see `Storage.write`.

        Raises:
            InputError: a value is for no variable, or has another shape; nothing is written.
            IpuError: within a call of a fused step, a value is in the memory that the variable was
                given. That holds the value from before the call.
        """
        self._storage.check(values)
        if self._one_call.locked() and caller() in self._inside:
            stored = next((n for n, v in values.items() if self._storage.is_stored(n, v)), None)
            if stored and self.fused:
                raise IpuError(
                    f"%{stored} is written within a call, with the value of before it: model and"
                    " program share its memory\n"
                    "  try:  write between calls, or hand over values in memory of their own"
                )
            self._storage.write_later(values)
            return

        def write() -> None:
            self._settle()
            self._storage.write(values)

        self._alone(write)

    def between_calls(self, action: Callable[[], T]) -> T:
        """Run `action` while no call runs. If another thread runs one, wait for its end.

        Raises:
            IpuError: this thread is within a call.
        """
        if self._one_call.locked() and caller() in self._inside:
            raise IpuError(
                "a call is running around this\n  try:  do it between calls, and not in on_send"
            )

        def settled() -> T:
            self._settle()
            self._storage.write({})  # which gives all replicas what the user wrote into the first
            return action()

        return self._alone(settled)

    def _alone(self, action: Callable[..., T], *arguments: Any) -> T:
        """Run `action` while no call runs; wait for a call of another thread."""
        me = caller()
        added = me not in self._inside
        try:
            self._inside.add(me)
            with self._one_call:
                return action(*arguments)
        finally:
            if added:
                self._inside.discard(me)

    @property
    def last_loss_scale(self) -> float | None:
        """Return the loss scale of the last step, if the program adjusts it."""
        last = self._looped.variants.current.end.last_loss_scale if self._looped else None
        return None if last is None else last.item()

    @property
    def retraced(self) -> Program | None:
        """The program with the updates of the last step, where these were traced later for its
        hyperparameters; None: it has not changed since it was compiled."""
        return self._looped.retraced if self._looped else None

    @property
    def other_updates(self) -> tuple[Program, ...]:
        """The program with all updates that were traced for other hyperparameters than its own."""
        variants = self._looped.variants.all if self._looped else ()
        return tuple(variant.host.program for variant in variants[1:])

    def trace_with(self, another: Callable[[], HostProgram]) -> None:
        """Let `another` trace updates for hyperparameters that no known variant fits."""
        self._another = another
        if self._looped:
            self._looped.another = another

    def step_with(self, host: HostStepper) -> None:
        """Let `host` make the step of an optimiser that runs in Python."""
        self._stepper = host
        if self._looped:
            self._looped.host = host

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        hyperparameters: Hyperparameters = (),
        sent: Sent | None = None,
    ) -> dict[str, Tensor]:
        """Run one call.

        Args:
            inputs: the caller's tensor for every input stream of the host.
            hyperparameters: for each update group, the values of its rule's hyperparameters.
            sent: is called with each device iteration and the values that it has sent, in order, on
                this thread, as soon as the iteration is complete. In training that includes its
                update. An error in `sent` ends the call after that iteration.

        Returns:
            The joined tensor of every output stream that is not printed.

        Raises:
            InputError: a tensor does not fit its stream.
            ExecutionError: an operator failed. The program can be called again; parameters,
                buffers and optimiser state are those after the last complete step, or for
                inference those before the call.
            UpdateError: an update failed, now or before, after it had begun to write variables.
            IpuError: another call is running, in another thread or around this one.
        """
        if self._one_call.locked() and (self._calls or caller() in self._inside):
            raise IpuError(
                "another call of this executable is running, in another thread or around this one\n"
                "  try:  one call after the other, or an executable for each thread"
            )
        ranks = self._looped.ranks if self._looped is not None else None
        if ranks is None:
            return self._alone(self._call, inputs, hyperparameters, sent)
        return self._alone(self._call_together, ranks, inputs, hyperparameters, sent)

    @property
    def calls_of_ranks(self) -> int:
        """How many calls this rank has begun together with others."""
        ranks = self._looped.ranks if self._looped is not None else None
        return 0 if ranks is None else ranks.calls

    def give_up(self, error: BaseException, calls: int) -> None:
        """End a call with an error that came before it, for ranks that wait in it.

        Args:
            calls: `calls_of_ranks` before. If there are more the call has begun, and has ended.

        Raises:
            BaseException: the error of a rank that failed first.
        """
        ranks = self._looped.ranks if self._looped is not None else None
        if ranks is None or self._one_call.locked() or ranks.calls != calls:
            return

        def fail() -> None:
            with ranks.operation():
                ranks.open(self._rounds)
                ranks.fail(error)

        self._alone(fail)

    def _call_together(
        self,
        ranks: RankCall,
        inputs: Mapping[str, Tensor],
        hyperparameters: Hyperparameters,
        sent: Sent | None,
    ) -> dict[str, Tensor]:
        """Run a call that fails on all ranks if it fails on one."""
        operation = ExitStack()
        try:
            with DeferredSignals():  # else an interrupt might come when it is begun and not open
                operation.enter_context(ranks.operation())
                ranks.open(self._rounds)
            return ranks.results(self._call(inputs, hyperparameters, sent))
        except BaseException as error:
            ranks.fail(error)
            raise
        finally:
            operation.close()
            ranks.close()

    def _call(
        self,
        inputs: Mapping[str, Tensor],
        hyperparameters: Hyperparameters,
        sent: Sent | None,
    ) -> dict[str, Tensor]:
        ranks = self._looped.ranks if self._looped is not None else None
        try:
            self._calls = True
            self._settle()
            self._commit.check()
            self._storage.spread_changes()
            if self._later is not None:
                self._take_over(hyperparameters)
            prints = PrintQueue(self._link.printing) if self._link.printing else None
            iterations = None if sent is None else Iterations(self._link, sent)
            recorded = None
            if recording.active or profiler_runs():
                recorded = self._call_timeline(recording.active)
            observer = joined(
                prints, self.timeline, self.transfers, self.records, iterations, recorded
            )
            streams = self._link.open(
                inputs,
                seed=self.seed,
                step=self.step,
                printed=observer.printed,
                every_iteration=sent is not None,
            )
            complete = False
            with KeptGradMode(), torch.no_grad():
                try:
                    self._storage.expect_writes()
                    if observer.call_began is not None:
                        observer.call_began(self.batching.micro_batches)
                    if ranks is not None:
                        state = streams.seed, streams.step
                        ranks.agree_on(inputs, state, hyperparameters, self._host.program)
                    self._form.prepare(hyperparameters)
                    if recorded is None:
                        self._form.run(self._rounds, streams, observer)
                    else:
                        with ProfilerRow(recorded.title):
                            self._form.run(self._rounds, streams, observer)
                    complete = True
                finally:
                    self._commit.end()
                    if self._storage.waiting:
                        self._storage.write_waiting()
                    self._storage.keep_writes()
                    if observer.call_ended is not None:
                        observer.call_ended(streams, complete)
            return self._link.returned(streams)
        finally:
            self._calls = False

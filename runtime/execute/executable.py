"""Run a program on this machine, each IPU on its torch device."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.ops.private.locks import caller, fork_safe_lock
from ipu_dynamo.ops.private.thread_modes import KeptGradMode
from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.private.profiler import ProfilerRow, profiler_runs
from ipu_dynamo.profiling.recording import Recording
from ipu_dynamo.program import Collective, HostProgram, Program, Send, TensorType
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.ir.verify.program import verify
from ipu_dynamo.program.schedule.dependencies import changed_by_replicas
from ipu_dynamo.program.schedule.planning import schedule_of, side_by_side
from ipu_dynamo.program.schedule.registers import number_registers
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import calls_of_passes
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.call_timeline import CallTimeline
from ipu_dynamo.runtime.execute.fused_step import FuseAgain, FusedStep
from ipu_dynamo.runtime.execute.host_io.batching import Batching, joined_type
from ipu_dynamo.runtime.execute.host_io.host_streams import HostLink, HostStreams
from ipu_dynamo.runtime.execute.host_io.print_queue import PrintQueue
from ipu_dynamo.runtime.execute.host_io.transfer_times import TransferTimes
from ipu_dynamo.runtime.execute.looped_step import LoopedStep
from ipu_dynamo.runtime.execute.memory.step_records import StepRecords
from ipu_dynamo.runtime.execute.memory.storage import Storage, Values
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.observer import Observer, joined
from ipu_dynamo.runtime.execute.replayed_step import ReplayedStep
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.runtime.execute.transaction.commit import Commit
from ipu_dynamo.runtime.execute.transaction.rank_vote import RankCall
from ipu_dynamo.runtime.execute.transaction.update_runs import UpdateRecipe
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.runtime.update.host_update import HostStepper

T = TypeVar("T")
Sent = Callable[[int, dict[str, Tensor]], None]  # a device iteration, and its results by stream


class StepForm(Protocol):
    """A way to run steps: a loop of micro-batches, a fused function, a replayed recording.

    A form opens each step, votes and writes by `commit`, or rebinds variables by it. It leaves a
    failed step to the executable, which settles it.

    Attributes:
        commit: makes each step complete or undone.
    """

    commit: Commit

    def prepare(self, hyperparameters: Hyperparameters) -> object:
        """Choose the form of the step for these hyperparameters, or make it."""

    def run(self, steps: int, streams: HostStreams, observer: Observer) -> None:
        """Run the steps of a call with the hyperparameters that were prepared last.

        Raises:
            ExecutionError: an operator failed. Complete steps before it last.
            UpdateError: an update failed, after it had begun to write variables.
        """

    def plan(self) -> HostPlan:
        """Describe a step for the printed host program."""


class Iterations(Observer):
    """Hands the results of each device iteration of a call to a function, in its grad mode."""

    def __init__(self, link: HostLink, sent: Sent) -> None:
        self._link, self._sent = link, sent
        self._gradients = torch.is_grad_enabled()

    def iteration_ended(self, streams: HostStreams, iteration: int) -> None:
        results = self._link.of_iteration(streams, iteration)
        with torch.set_grad_enabled(self._gradients):
            self._sent(iteration, results)


def results_of_row(host: HostProgram, batching: Batching) -> list[tuple[str, int, TensorType]]:
    """The results of a call on a row of ranks: the name, the IPU that sends it, and the type."""
    ipus = {i.stream: i.ipu for i in host.inlined.walk() if isinstance(i, Send)}
    return [
        (output.name, ipus[output.name], joined_type(output, batching))
        for output in host.inlined.outputs
        if output.printing is None
    ]


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

    Attributes:
        program: the instructions of every IPU.
        replicas: those that run here. Places of replicas are places among these.
        batching: how the caller's tensors split into the micro-batches of the program's loops.
        step: device iterations completed since the seed was set, over all calls.
        schedule: the actions of each worker, in order.
        timeline, records, transfers: set them to record the times of tasks, values of variables in
            the steps of a call, and the times of transfers; nothing else changes.
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
    ) -> None:
        verify(host.program)
        assert host.share == (None if transport is None else transport.share)
        self.program, self._host, self._engine = host.program, host, engine
        program, self.replicas = host.inlined, host.replicas
        self.batching = batching = Batching.of(program, len(self.replicas.own), group_of)
        self.devices = tuple(devices) or (torch.device("cpu"),) * program.num_ipus
        self.seed = seed
        self._first_step = 0  # counted before the first step of this executable
        self.timeline: Timeline | None = None
        self.transfers: TransferTimes | None = None
        self.records: StepRecords | None = None
        self.memory = StreamingMemory()
        program = host.runs
        cut = sections(program)
        registers = number_registers(program, devices=self.devices)
        self._storage = storage = Storage(program, tensors, registers, self.replicas)
        self._rounds, self._per_round = cut.steps, cut.micro_batches
        if host.deferred:
            (call,) = calls_of_passes(cut.loop)
            sums, count = host.deferred.accumulators, self._per_round
            self.schedule = side_by_side(call, sums, micro_batches=count, workers=workers or 1)
            if len(self.schedule.workers) > 1:
                self.schedule.check(program, adds=True)
        else:
            self.schedule = self.schedule_for(workers, check=host.fused is None)
        self._link = HostLink(program, batching, self.replicas.own, self.devices)
        self.fused: FusedStep | None = None
        self._looped: LoopedStep | None = None
        self._ranks: RankStreams | None = None
        # of the results that ranks of a row give each other; None: one rank has all IPUs
        self._row: Sequence[tuple[str, int, TensorType]] | None = None
        if host.fused is not None:
            replays = any(recipe.replays for recipe in host.recipes.values())
            form = ReplayedStep if replays else FusedStep
            drops, devices = self._link.drops, self.devices
            self._form: StepForm
            self._form = self.fused = form(host, engine, storage, drops, devices, fuse_again)
            self.fused.prepare(hyperparameters)
        else:
            if transport is not None and self._has_messages:
                self._ranks = RankStreams(host, self.schedule, transport)
                engine.checks.agree(judges=transport.share.row == 0)
                if transport.share.columns > 1:
                    self._row = results_of_row(host, batching)
            self._form = self._looped = LoopedStep(
                host,
                storage,
                batching.iterations,
                self.schedule,
                self._link.drops,
                devices=self.devices,
                memory=self.memory,
                guard_updates=guard_updates,
                engine=engine,
                update_recipe=update_recipe,
                streams=self._ranks,
                row=self._row,
                others=others,
            )
        self._commit = self._form.commit
        self._one_call = fork_safe_lock()
        # While the lock is taken: whether by a call, and the threads that have it or wait for it.
        self._calls, self._inside = False, set[int]()

    def keep_timeline(self) -> None:
        """Record all that each call does from now on; `timeline` has it of the last call."""
        self.timeline = self._call_timeline()

    def _call_timeline(self, to: Sequence[Recording] = ()) -> CallTimeline:
        return CallTimeline(self._host.runs, replicas=self.replicas.own, to=to)

    @property
    def host_program(self) -> HostProgram:
        """Return the host's part of the program; its text has every decision and its reason."""
        return replace(self._host, plan=self.host_plan)

    @property
    def host_plan(self) -> HostPlan:
        """How a step runs here."""
        return self._form.plan()

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
        """What each IPU of every replica does when. An IPU repeats what this computer may keep."""
        return self._scheduled(self.program, None)

    def schedule_for(self, workers: int | None, *, check: bool = False) -> Schedule:
        """How this many workers would run a step here; None is one for each IPU of every replica.

        Args:
            check: that they do not wait for ever, and compute what the program says.
        """
        return self._scheduled(self._host.inlined, workers, check=check)

    def _scheduled(self, program: Program, workers: int | None, *, check: bool = False) -> Schedule:
        host = self._host
        own, first, ipus = self.replicas.own, self.replicas.own.start, host.ipus
        exchange = host.share is not None and self._exchanges_in_loop
        planned = self.replicas.count if exchange else len(own)
        schedule = schedule_of(
            program,
            micro_batches=self._per_round,
            replicas=planned,
            workers=workers,
            share=host.share,
        )
        if check and len(schedule.workers) > 1:  # one worker alone never waits
            schedule.check(program, replicas=planned)
        if host.share is None:
            return schedule
        return (
            schedule.for_share(own, ipus, 0)
            if exchange
            else schedule.for_share(range(planned), ipus, first)
        )

    @property
    def _exchanges_in_loop(self) -> bool:
        """Whether replicas exchange values within micro-batches."""
        return any(isinstance(i, Collective) for i in sections(self._host.inlined).loop)

    @property
    def _has_messages(self) -> bool:
        """Whether a step sends other ranks anything; if not, none need run a step at once."""
        share = self._host.share
        if share is None:
            return False
        if self.program.kind == "training" or share.columns > 1 or self._exchanges_in_loop:
            return True
        return bool(changed_by_replicas(self._host.inlined))

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
        if self._looped:
            self._looped.another = another

    def step_with(self, host: HostStepper) -> None:
        """Let `host` make the step of an optimiser that runs in Python."""
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

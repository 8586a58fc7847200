"""Run steps as loops of micro-batches, with an update after each of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError, UpdateNotTraced
from ipu_dynamo.program import HostProgram, Program, Update, UpdateFactors
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.schedule.dependencies import changed_by_replicas, changed_variables
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.engines import EagerEngine, Engine
from ipu_dynamo.runtime.execute.describe_plan import described_passes, plan_of
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.observer import Observer
from ipu_dynamo.runtime.execute.specialisations import Specialisations
from ipu_dynamo.runtime.execute.step_end import Block, StepEnd
from ipu_dynamo.runtime.execute.tasks.micro_batch_loop import MicroBatchLoop
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import stages_of
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams, RowValue
from ipu_dynamo.runtime.execute.timed import Timed
from ipu_dynamo.runtime.execute.transaction.commit import Commit
from ipu_dynamo.runtime.execute.transaction.rank_vote import RankCall
from ipu_dynamo.runtime.execute.transaction.rollback import rollback_of
from ipu_dynamo.runtime.execute.transaction.update_runs import UpdateRecipe, UpdateRuns
from ipu_dynamo.runtime.execute.transaction.user_writes import WeightsInCommon
from ipu_dynamo.runtime.update.host_update import HostStepper
from ipu_dynamo.runtime.update.rounding import HalfRounder
from ipu_dynamo.runtime.update.traced_update import Run, TracedFactors


def cannot_trace() -> HostProgram:
    """Refuse to trace a program anew: it has no optimizer.

    Raises:
        UpdateNotTraced: always.
    """
    raise UpdateNotTraced(
        "the update was traced for other numbers, and a loaded program has no optimizer to trace",
        hint="save the model and the optimizer's state_dict, and compile it again",
    )


def no_optimizer(gradients: Mapping[str, Tensor]) -> None:
    """Refuse to update parameters without an optimizer.

    Raises:
        IpuError: always.
    """
    raise IpuError(f"there is no optimizer for the gradients of {', '.join(gradients)}")


def from_host(run: Run, host: torch.device) -> Run:
    """Return `run` on hyperparameters copied from elsewhere."""

    def moved(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        return run([argument.to(host) for argument in arguments])

    return moved


class Variant(NamedTuple):
    """The end of a step whose updates were traced for some hyperparameters.

    Args:
        fits: see `Specialisation`. It computes the numbers of the next step, too.
    """

    host: HostProgram
    end: StepEnd
    fits: Callable[[Hyperparameters], bool] | None


class LoopedStep:
    """Steps whose micro-batches run one after another or on several workers, before their update.

    Args:
        host: the program to run.
        iterations: device iterations of a call.
        drops: of every output, see `HostLink`.
        devices: of the IPUs.
        memory: where variables are loaded from and stored.
        guard_updates: keep copies of the tensors that updates write, until these are complete.
        engine: makes callables of functions, also of traced updates.
        update_recipe: how functions of traced updates become callables; None without such updates.
        streams: from and to other ranks; None: there are no others.
        row: of the results that ranks of a row give each other, if they do.
        others: the same loop and variables, with updates that were traced for other
            hyperparameters.

    Attributes:
        commit: makes each step complete or undone.
        variants: the ends of steps. The first is that of `host`. Tracing and readers of files bound
            their number.
        ranks: makes each call succeed on all ranks or none; None: there are no others.
        host: makes the step of an optimiser that runs in Python.
        another: traces the update for the next step, if none of the variants fits it.
    """

    def __init__(
        self,
        host: HostProgram,
        storage: Storage,
        iterations: int,
        schedule: Schedule,
        drops: Sequence[bool],
        *,
        devices: Sequence[torch.device],
        memory: StreamingMemory,
        guard_updates: bool,
        engine: Engine,
        update_recipe: UpdateRecipe | None = None,
        streams: RankStreams | None = None,
        row: Sequence[RowValue] | None = None,
        others: Sequence[HostProgram] = (),
    ) -> None:
        program = host.runs
        self.another: Callable[[], HostProgram] = cannot_trace
        self.host: HostStepper = no_optimizer
        self._hyperparameters: Hyperparameters = ()
        self._host, self._engine, self._schedule = host, engine, schedule
        self._devices, self._memory = devices, memory
        self._runs = UpdateRuns(engine, host.threads, update_recipe)
        cut, self._rounding = sections(program), HalfRounder()
        self._storage, self._streams = storage, streams
        # of which the model has the values of replica 0, which another rank may run
        self._of_first: tuple[str, ...] = ()
        if streams is not None and streams.transport.share.rows > 1:
            self._of_first = changed_by_replicas(program)
        self._trains = program.kind == "training"
        updates = [i for i in program.walk() if isinstance(i, Update)]
        self._rounds_at_random = any(update.rounding == "stochastic" for update in updates)
        self._iterations = iterations // cut.steps

        begin = [i for i in cut.before if not isinstance(i, UpdateFactors)]
        tensors = storage.of_replicas()
        self._begin = StepEnd(
            program, begin, tensors, host.replicas, devices, self._rounding, memory, streams=streams
        )
        known = [self._variant(each) for each in (host, *others)]
        self.variants = Specialisations(self._make, known)
        rollback = rollback_of(
            program,
            host.replicas,
            storage.tensor,
            known[0].end.lasting,
            guard=guard_updates,
            reload=self._reload_states,
            copies=[storage.stored_tensor(name) for name in self._of_first],
        )
        self.commit, self._guards = Commit(storage, rollback), guard_updates
        self.ranks: RankCall | None = None
        if streams is not None:
            weights = self._weights_in_common(rollback.before)
            ends = self._begin, known[0].end
            self.ranks = RankCall(streams, row, weights, ends, engine.checks)
        self._loop = MicroBatchLoop(
            program,
            stages_of(host, self._runs.compile),  # the functions of updates with them
            storage,
            host.replicas,
            schedule,
            drops,
            threads=host.threads,
            devices=devices,
            memory=memory,
            deferred=host.deferred,
            streams=streams,
        )

    def go_on_from(self, other: "LoopedStep") -> None:
        """Have the loss scale of the last step, which another form of the program has run."""
        own, last = (f.variants.current.end.last_loss_scale for f in (self, other))
        if own is not None and last is not None:
            own.copy_(last)

    def _weights_in_common(self, before: Callable[[Tensor], Tensor]) -> WeightsInCommon:
        """The tensors that users may write on one rank, or on all of them."""
        kinds = ("parameter", "buffer", "state", "loss_scale")
        variables = [v for v in self._host.inlined.variables if v.kind in kinds]
        own = {variable.name for variable in self._host.runs.variables}
        groups = {
            v.name: {*self._host.replicas.groups_of(v.groups)} if v.name in own else ()
            for v in variables
            if v.groups is not None
        }
        tensors = {v.name: self._storage.stored_tensor(v.name) for v in variables}
        return WeightsInCommon(tensors, own, groups, before)

    def _reload_states(self) -> None:
        """Read optimiser states again, which were overwritten."""
        for variant in self.variants.all:
            variant.end.reload_states()

    def _make(self, _: Hyperparameters) -> Variant:
        """Trace the updates of the next step, and compile them."""
        self._runs.forget_waiting()  # of one that was not completed
        variant = self._variant(self.another())
        self._runs.compile()
        return variant

    @property
    def retraced(self) -> Program | None:
        """The program of the last step, if its updates were traced later."""
        host = self.variants.current.host
        lasts = any(isinstance(i, Update) and not i.once for i in host.program.walk())
        return host.program if lasts and host is not self._host else None

    def _variant(self, host: HostProgram) -> Variant:
        """The end of a step of `host`, which differs from others in its updates."""
        program = host.runs
        cut, tensors = sections(program), self._storage.of_replicas()
        factors = next((i for i in cut.before if isinstance(i, UpdateFactors)), None)
        made = self._factors(program, factors, tensors) if factors is not None else None
        end = StepEnd(
            program,
            cut.after,
            tensors,
            self._host.replicas,
            self._devices,
            self._rounding,
            self._memory,
            self._runs,
            made,
            lambda gradients: self.host(gradients),
            self._streams,
        )
        if self._of_first:
            values = [tensors[name][0] for name in self._of_first]
            copies = [self._storage.stored_tensor(name) for name in self._of_first]
            end.copy_first_replica(values, copies)
        return Variant(host, end, made.compute if made is not None else None)

    def _factors(
        self, program: Program, factors: UpdateFactors, tensors: Mapping[str, Sequence[Tensor]]
    ) -> TracedFactors:
        function = program.update_function(factors.function)
        pairs = zip(factors.hyperparameters, function.inputs, strict=False)
        device = self._devices[factors.ipu]
        host = torch.device("cpu")
        on_host = device == host
        counters = [tensors[name][0] for name in factors.counters]
        (run,) = EagerEngine().compile([FunctionRecipe(function, function, "eager")])
        return TracedFactors(
            run if on_host else from_host(run, host),
            [(group, place, type_.dtype) for (group, place, _), type_ in pairs],
            counters,
            [torch.zeros((), dtype=type_.dtype, device=device) for type_ in factors.types],
        )

    def prepare(self, hyperparameters: Hyperparameters) -> None:
        """Use these hyperparameters. Each step chooses the update that was traced for it."""
        self._hyperparameters = hyperparameters

    def run(self, steps: int, streams: HostStreams, observer: Observer) -> None:
        """Run the steps of a call; all of its micro-batches, when there are no updates."""
        commit, timed = self.commit, None
        if observer.instruction_ended is not None:
            timed = partial(Timed, observer.instruction_ended, 0, None, None)
        for step in range(steps):
            start = perf_counter() if observer.step_timed is not None else 0.0
            if self.ranks is None:
                end = self.variants.choose(self._hyperparameters).end
                commit.open()
                self._compute(step, end, streams, observer, timed)
                self._write(end, timed)
            else:
                while not self._run_together(self.ranks, step, streams, observer, timed):
                    commit.settle()  # undoes the step
            if observer.step_timed is not None:
                observer.step_timed(step, (start, perf_counter()))
            if observer.step_ended is not None:
                observer.step_ended(step, commit.current)
            if self._trains and observer.iteration_ended is not None:
                observer.iteration_ended(streams, step)
            if self._storage.waiting:
                self._storage.write_waiting()

    def _run_together(
        self,
        ranks: RankCall,
        step: int,
        streams: HostStreams,
        observer: Observer,
        timed: Block | None,
    ) -> bool:
        """Run a step with other ranks. Return whether it is complete: see `deciding`."""
        end = self.variants.choose(self._hyperparameters).end
        self.commit.open()
        ranks.begin(self._begin, end)
        self._compute(step, end, streams, observer, timed)
        with ranks.deciding() as complete:
            if complete:
                self._write(end, timed)
        return complete

    def _write(self, end: StepEnd, timed: Block | None) -> None:
        """Write the variables of a step that has succeeded so far."""
        write = end.write if timed is None else partial(end.write, timed)
        self.commit.vote()
        if not end.commits:
            self.commit.complete(self._iterations)
        elif self.ranks is not None and self._guards:
            together = partial(self.ranks.agree_on_update, write)
            self.commit.write(together, self._iterations)
        else:
            self.commit.write(write, self._iterations, counts=self.ranks is not None)

    def _compute(
        self,
        step: int,
        end: StepEnd,
        streams: HostStreams,
        observer: Observer,
        timed: Block | None,
    ) -> None:
        """Run all of a step that comes before its first write of a lasting variable."""
        ranks = self.ranks
        if ranks is not None:  # notes the operation that runs, for votes on its error
            ranks.place = (0,)
        self._begin.prepare(self._hyperparameters, timed)
        if self._begin.copies:
            self._loop.hold(self._begin.copies)
        if ranks is not None:
            ranks.place = (1,)
        try:
            self._loop(step, streams, observer)
        except BaseException:
            if ranks is not None:
                ranks.place = (1, *self._loop.failed)
            raise
        if ranks is not None:
            ranks.place = (2,)
        if observer.update_began is not None:
            observer.update_began(step, self.commit.current)
        if end.commits:
            if self._rounds_at_random:
                number = streams.step + step * self._iterations
                self._rounding.begin(seed=streams.seed, step=number)
            end.prepare(self._hyperparameters, timed)

    def plan(self) -> HostPlan:
        """Describe a step for the printed host program."""
        host, binding = self._host, self._loop.binding
        program, ran = host.inlined, binding.program
        cut = sections(program)
        changed = changed_variables(ran)
        sums = [v.name for v in program.variables if v.kind == "accumulator"]
        undone = [f"clear {name}" for name in sums]
        undone += [f"put back {v.name}" for v in program.variables if v.name in changed - {*sums}]
        return plan_of(
            host,
            self._engine,
            self._devices,
            binding,
            described_passes(binding),
            before=[*map(str, cut.before)],
            commit=[*map(str, cut.after)],
            undone=undone,
            workers=str(self._schedule),
        )

"""Run steps as loops of micro-batches, with an update after each of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError, UpdateNotTraced
from ipu_dynamo.program import Copy, HostProgram, Program, Update, UpdateFactors
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.program.schedule.dependencies import changed_variables
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import instructions_of_passes, stage_passes
from ipu_dynamo.runtime.engines.engines import EagerEngine, Engine
from ipu_dynamo.runtime.execute.describe_plan import plan_of
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.observer import Observer
from ipu_dynamo.runtime.execute.step_end import StepEnd
from ipu_dynamo.runtime.execute.tasks.micro_batch_loop import MicroBatchLoop
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import stages_of
from ipu_dynamo.runtime.execute.tasks.task_code import TaskWriter
from ipu_dynamo.runtime.execute.transaction.commit import Commit
from ipu_dynamo.runtime.execute.transaction.rollback import rollback_of
from ipu_dynamo.runtime.execute.transaction.update_runs import UpdateRecipe, UpdateRuns
from ipu_dynamo.runtime.update.host_update import HostStepper
from ipu_dynamo.runtime.update.rounding import StochasticRounding
from ipu_dynamo.runtime.update.traced_update import Run, TracedFactors


def cannot_trace() -> Program:
    """What a program does that nobody can trace anew.

    Raises:
        UpdateNotTraced: always.
    """
    raise UpdateNotTraced(
        "the update was traced for other numbers, and a loaded program has no optimizer to trace",
        hint="save the model and the optimizer's state_dict, and compile it again",
    )


def no_optimizer(gradients: Mapping[str, Tensor]) -> None:
    """What a program does whose optimiser is not there.

    Raises:
        IpuError: always.
    """
    raise IpuError(f"there is no optimizer for the gradients of {', '.join(gradients)}")


def from_host(run: Run, host: torch.device) -> Run:
    """`run`, on hyperparameters that lie elsewhere."""

    def moved(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        return run([argument.to(host) for argument in arguments])

    return moved


class LoopedStep:
    """Steps whose micro-batches run one after another or on several workers, before their update.

    Args:
        host: what to run, with the registers of `storage`.
        iterations: device iterations of a call.
        drops: of every output, see `HostLink`.
        devices: of the IPUs.
        memory: where variables are loaded from and stored.
        guard_updates: keep copies of what updates write until they are complete.
        engine: makes callables of functions, also of traced updates.
        update_recipe: how functions of traced updates become callables; None: there are none.
        others: programs with the same loop and variables whose updates were traced for other
            hyperparameters.

    Attributes:
        commit: what makes each step complete or undone.
        program: of the last step, or of the next.
        host: makes the step of an optimiser that runs in Python.
        another: traces the update for the next step, where none of those that are known is for it.
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
        others: Sequence[Program] = (),
    ) -> None:
        program = host.runs
        self.program, self.another = program, cannot_trace
        self.host: HostStepper = no_optimizer
        self._hyperparameters: Hyperparameters = ()
        self._host, self._engine, self._schedule = host, engine, schedule
        self._devices, self._memory = devices, memory
        self._runs = UpdateRuns(engine, host.threads, update_recipe)
        cut, self._rounding = sections(program), StochasticRounding()
        self._storage = storage
        self._trains = program.kind == "training"
        self._iterations = iterations // cut.steps

        moves = [i for i in cut.before if not isinstance(i, Copy | UpdateFactors)]
        tensors = storage.of_replicas()
        self._begin = StepEnd(program, moves, tensors, devices, self._rounding, memory)
        self.end = self._end_of(program)
        self._ends = [(program, self.end), *((other, self._end_of(other)) for other in others)]
        rollback = rollback_of(
            program,
            program.replicas,
            storage.tensor,
            self.end.lasting,
            guard=guard_updates,
            reload=self._reload_states,
        )
        self.commit = Commit(storage, rollback)
        self._loop = MicroBatchLoop(
            program,
            stages_of(host, self._runs.compile),  # the functions of updates with them
            storage,
            schedule,
            drops,
            threads=host.threads,
            devices=devices,
            memory=memory,
            deferred=host.deferred,
        )

    def _reload_states(self) -> None:
        """Read optimiser states again, which were overwritten."""
        for _, end in self._ends:
            end.reload_states()

    def add(self, program: Program) -> None:
        """Take in the updates of another program."""
        end = self._end_of(program)
        self._runs.compile()
        self._ends.append((program, end))

    @property
    def others(self) -> tuple[Program, ...]:
        """All programs but the first."""
        return tuple(program for program, _ in self._ends[1:])

    @property
    def retraced(self) -> Program | None:
        """The program of the last step, if its updates were traced later."""
        lasts = any(isinstance(i, Update) and not i.once for i in self.program.walk())
        return self.program if lasts and self.program is not self._ends[0][0] else None

    def _end_of(self, program: Program) -> StepEnd:
        """The end of a step of `program`, which differs from others in its updates."""
        cut, tensors = sections(program), self._storage.of_replicas()
        factors = next((i for i in cut.before if isinstance(i, UpdateFactors)), None)
        hyperparameters = self._factors(program, factors, tensors) if factors is not None else None
        return StepEnd(
            program,
            cut.after,
            tensors,
            self._devices,
            self._rounding,
            self._memory,
            self._runs,
            hyperparameters,
            lambda gradients: self.host(gradients),
        )

    def _factors(
        self, program: Program, factors: UpdateFactors, tensors: Mapping[str, Sequence[Tensor]]
    ) -> TracedFactors:
        function = next(f for f in program.update_functions if f.name == factors.function)
        pairs = zip(factors.hyperparameters, function.inputs, strict=False)
        device = self._devices[factors.ipu]
        host = torch.device("cpu")
        on_host = device == host
        counters = [tensors[name][0] for name in factors.counters]
        (run,) = EagerEngine().compile([Recipe(function, function, "eager")])
        return TracedFactors(
            run if on_host else from_host(run, host),
            [(group, place, type_.dtype) for (group, place, _), type_ in pairs],
            counters,
            [torch.zeros((), dtype=type_.dtype, device=device) for type_ in factors.types],
        )

    def _choose(self, hyperparameters: Hyperparameters) -> None:
        """Take the updates that were traced for the hyperparameters of the next step."""
        if self.end.factors is None or self.end.factors.compute(hyperparameters):
            return
        for program, end in self._ends:
            if end.factors is not None and end.factors.compute(hyperparameters):
                self.program, self.end = program, end
                return
        self.add(self.another())
        self.program, self.end = self._ends[-1]
        assert self.end.factors is not None
        if not self.end.factors.compute(hyperparameters):
            raise IpuError("an update that was traced for the numbers of a step is not for them")

    def prepare(self, hyperparameters: Hyperparameters) -> None:
        """Use these hyperparameters. Each step chooses the update that was traced for it."""
        self._hyperparameters = hyperparameters

    def run(self, steps: int, streams: HostStreams, observer: Observer) -> None:
        """Run the steps of a call; all of its micro-batches, when there are no updates."""
        commit, iterations = self.commit, self._iterations
        for step in range(steps):
            self._choose(self._hyperparameters)
            commit.open()
            self._begin.prepare(self._hyperparameters)
            self._loop(step, streams, observer)
            commit.vote()
            if observer.update_began is not None:
                observer.update_began(step, commit.current)
            if self.end.commits:
                self._rounding.begin(seed=streams.seed, step=streams.step + step * iterations)
                self.end.prepare(self._hyperparameters)
                commit.write(self.end.write, iterations)
            else:
                commit.complete(iterations)
            if observer.step_ended is not None:
                observer.step_ended(step, commit.current)
            if self._trains and observer.iteration_ended is not None:
                observer.iteration_ended(streams, step)
            if self._storage.waiting:
                self._storage.write_waiting()

    def plan(self) -> HostPlan:
        """Say what a step does, for the printed host program."""
        host, binding = self._host, self._loop.binding
        program, ran = host.inlined, binding.program
        cut, loop = sections(program), sections(ran).loop
        passes = stage_passes(ran.calls)
        texts = TaskWriter(binding, instructions_of_passes(loop)).texts()
        titles = [
            f"pass {number}, {calls[0].direction} of stage {calls[0].stage} on ipu{calls[0].ipu}"
            for number, calls in enumerate(passes)
        ]
        copies = [i for i in cut.before if isinstance(i, Copy)]
        (copied,) = TaskWriter(binding, [copies]).texts()
        others = [str(i) for i in cut.before if not isinstance(i, Copy)]
        changed = changed_variables(ran)
        sums = [v.name for v in program.variables if v.kind == "accumulator"]
        undone = [f"clear {name}" for name in sums]
        undone += [f"put back {v.name}" for v in program.variables if v.name in changed - {*sums}]
        return plan_of(
            host,
            self._engine,
            self._devices,
            binding,
            [*zip(titles, map(tuple, texts), strict=True)],
            before=(*others, *copied),
            commit=[*map(str, cut.after)],
            undone=undone,
            workers=str(self._schedule),
        )

"""Run the steps of a call, each of which happens as a whole or not at all."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError, UpdateNotTraced
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import Copy, Program, Update, UpdateFactors
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.engines import EagerEngine, Engine
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.observer import Observer
from ipu_dynamo.runtime.execute.step_end import Hyperparameters, StepEnd
from ipu_dynamo.runtime.execute.tasks.micro_batch_loop import MicroBatchLoop
from ipu_dynamo.runtime.execute.transaction.rollback import transaction_of
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


class TransactionalSteps:
    """What comes before the micro-batches of a step, and its commit after them.

    Args:
        program: what runs, with the registers of `storage`.
        iterations: device iterations of a call.
        devices: of the IPUs.
        memory: where variables are loaded from and stored.
        guard_updates: keep copies of what updates write until they are complete.
        engine: makes callables of the functions of traced updates.
        update_recipe: says how; None: there are none.
        threads: intra-op threads of these.
        others: programs with the same loop and variables whose updates were traced for other
            hyperparameters.

    Attributes:
        transaction: what has become of the last step.
        program: of the last step, or of the next.
        host: makes the step of an optimiser that runs in Python.
        another: traces the update for the next step, where none of those that are known is for it.
    """

    def __init__(
        self,
        program: Program,
        storage: Storage,
        iterations: int,
        *,
        devices: Sequence[torch.device],
        memory: StreamingMemory,
        guard_updates: bool,
        engine: Engine,
        threads: int | None,
        update_recipe: UpdateRecipe | None = None,
        others: Sequence[Program] = (),
    ) -> None:
        self.program, self.another = program, cannot_trace
        self.host: HostStepper = no_optimizer
        self._engine, self._threads, self._devices, self._memory = engine, threads, devices, memory
        self._runs = UpdateRuns(engine, threads, update_recipe)
        cut, self._rounding = sections(program), StochasticRounding()
        self._storage = storage
        self._trains = program.kind == "training"
        self._steps, self._iterations = cut.steps, iterations // cut.steps

        moves = [i for i in cut.before if not isinstance(i, Copy | UpdateFactors)]
        tensors = storage.of_replicas()
        self._begin = StepEnd(program, moves, tensors, devices, self._rounding, memory)
        self.end = self._end_of(program)
        self._ends = [(program, self.end), *((other, self._end_of(other)) for other in others)]
        self.transaction = transaction_of(
            program,
            program.replicas,
            storage.tensor,
            self.end.lasting,
            guard=guard_updates,
            reload=self.end.reload_states,
        )
        storage.rewritten = self._rewritten
        self._signals = DeferredSignals()

    def compile(self, recipes: Sequence[Recipe]) -> list[Stage]:
        """Compile the functions of updates, before the first step, and others with them."""
        return self._runs.compile(recipes)

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

    def _rewritten(self, names: Iterable[str]) -> None:
        """Follow variables that were overwritten between two steps."""
        self.transaction.rewritten(names)
        for _, end in self._ends:
            end.reload_states()

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

    def __call__(
        self,
        loop: MicroBatchLoop,
        hyperparameters: Hyperparameters,
        streams: HostStreams,
        observer: Observer,
        *,
        seed: int,
        first: int,
    ) -> None:
        """Run the steps of a call; all of its micro-batches, when there are none.

        Args:
            loop: the micro-batches.
            seed: of the random streams.
            first: number of the first device iteration that `transaction` counts.
        """
        for step in range(self._steps):
            self._choose(hyperparameters)
            try:
                self.transaction.begin()
                self._begin.prepare(hyperparameters)
                loop(step, streams, observer)
                if observer.update_began is not None:
                    observer.update_began(step, self._storage.current)
                self._commit(hyperparameters, seed, first)
                if observer.step_ended is not None:
                    observer.step_ended(step, self._storage.current)
                if self._trains and observer.iteration_ended is not None:
                    observer.iteration_ended(streams, step)
                if self._storage.waiting:
                    self._storage.write_waiting()
            except BaseException:
                with self._signals:
                    self.transaction.recover()
                raise

    def _commit(self, hyperparameters: Hyperparameters, seed: int, first: int) -> None:
        """Make a step complete, once its micro-batches have run."""
        transaction, end = self.transaction, self.end
        if not end.commits:
            transaction.complete(self._iterations)
            return
        self._rounding.begin(seed=seed, step=first + transaction.steps)
        end.prepare(hyperparameters)
        with self._signals:
            transaction.commit()
            try:
                end.write()
                end.clear()
            except Exception as error:
                raise transaction.failure(error) from error
            transaction.complete(self._iterations)

"""Run linked steps: a call's device iterations, with nothing between them but the function."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_copy_
from ipu_dynamo.program import Call, Program, Update
from ipu_dynamo.program.schedule.schedule import Task
from ipu_dynamo.progress import begin
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.engines.recipe import Stage
from ipu_dynamo.runtime.execute.deferred_signals import DeferredSignals
from ipu_dynamo.runtime.execute.error_attribution import explain
from ipu_dynamo.runtime.execute.step_end import Numbers
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.runtime.execute.transfer_times import CallTimes
from ipu_dynamo.runtime.lower.fuse_step import Linked, Zeros, link
from ipu_dynamo.runtime.lower.make_recipe import stage_of
from ipu_dynamo.runtime.lower.update_graphs import LEFT_OUT

Kept = Sequence[Sequence[bool]]  # for each output stream, whether a step's value is wanted


class LinkedRun:
    """The steps of a program that `can_link`.

    Invariant: after `write_home` the variables' tensors hold their values; within a call they hold
    those from before it. A step is complete as soon as its results take the variables' place.

    Args:
        program: what to run.
        engine: compiles the linked functions, one for each set of numbers that are left out.
        tensors: of every variable.
        threads: intra-op threads; None is torch's number.

    Attributes:
        completed: steps over all calls, also of those that failed later.
    """

    def __init__(
        self, program: Program, engine: Engine, tensors: Mapping[str, Tensor], threads: int | None
    ) -> None:
        (self._call,) = program.calls
        self._program, self._engine, self._tensors = program, engine, tensors
        self._threads = threads
        self.completed = 0
        self._signals = DeferredSignals()
        self._pending: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None  # home, values
        self._rules = {i.group: i.rule for i in program.walk() if isinstance(i, Update)}
        self._linked: dict[Zeros, tuple[Linked, Stage]] = {}
        self._values: list[list[float]] = []
        self._numbers: list[Tensor] = []
        self._now: tuple[Linked, Stage] | None = None

    def prepare(self, numbers: Numbers) -> tuple[Linked, Stage]:
        """The function for these numbers, compiled if there was none like them before."""
        values = [[float(number) for number in group] for group in numbers]
        if self._now is not None and values == self._values:
            return self._now
        named = {
            (group, name): value
            for group, rule in self._rules.items()
            for name, value in zip(rule.hyperparameters, values[group], strict=True)
        }
        zeros = frozenset(p for p, value in named.items() if value == 0.0 and p[1] in LEFT_OUT)
        if zeros not in self._linked:
            begin("functions", 1, 1)
            linked = link(self._program, zeros)
            self._linked[zeros] = linked, stage_of(linked.function, self._engine, self._threads)
        self._now = self._linked[zeros]
        wanted = self._now[0].numbers
        self._numbers = [torch.tensor(named[pair], dtype=torch.float64) for pair in wanted]
        self._values = values
        return self._now

    def __call__(
        self,
        numbers: Numbers,
        received: Mapping[str, Sequence[Tensor]],
        steps: int,
        kept: Kept,
        collected: Sequence[list[Tensor | None]],
        timeline: Timeline | None = None,
        times: CallTimes | None = None,
    ) -> None:
        """Run `steps` steps.

        Args:
            received: for every name that the loop receives, its tensor in each step.
            collected: gets the kept values of every output stream.
            timeline: records every step as a task, whose name is the fused function's.
            times: records when inputs are taken and outputs are there.

        Raises:
            ExecutionError: an operator failed; variables are those after the last complete step.
        """
        linked, function = self.prepare(numbers)
        if timeline is not None:
            call = replace(self._call, function=linked.function.name)
            function = _recorded(function, timeline, call)
        own: Sequence[Tensor] = [self._tensors[name] for name in linked.state]
        views = [received[name] for name in linked.received]
        constants = [self._tensors[name] for name in linked.constants]
        size, state, tail = len(own), own, self._numbers
        wanted = [
            (size + i, keep, into)
            for i, (keep, into) in enumerate(zip(kept, collected, strict=True))
        ]
        try:
            for step, *given in zip(range(steps), *views, strict=True):
                begin = perf_counter()
                arguments = [*state, *constants, *given, *tail]
                if times is not None:
                    times.received[step] = begin, perf_counter()
                try:
                    results = function(arguments)
                except Exception as error:
                    names = (*linked.state, *linked.constants, *linked.received)
                    values = dict(zip(names, (*state, *constants, *given), strict=True))
                    raise self._explained(error, values, step) from error
                state = results[:size]  # type: ignore[assignment]
                self._pending, self.completed = (own, state), self.completed + 1
                begin = perf_counter()
                for place, keep, into in wanted:
                    if keep[step]:
                        into[step] = results[place]
                if times is not None:
                    times.sent[step] = begin, perf_counter()
        finally:
            try:
                self.write_home()
            except BaseException:  # an interrupt: the next one has to wait
                with self._signals:
                    self.write_home()
                raise

    @property
    def settled(self) -> bool:
        """Whether the variables' tensors hold their values."""
        return self._pending is None

    def write_home(self) -> None:
        """Write what the last complete step has made to the variables' tensors."""
        if self._pending is not None:
            foreach_copy_(*self._pending)
            self._pending = None

    def _explained(self, error: Exception, values: Mapping[str, Tensor], step: int) -> Exception:
        call: Call = self._call
        function = next(f for f in self._program.functions if f.name == call.function)
        given = [values[n] if n in values else self._tensors[n] for n in call.arguments]
        return explain(error, call, function, given, step)


def _recorded(function: Stage, timeline: Timeline, call: Call) -> Stage:
    """`function`, which is the whole of a step, with a span for each of its runs."""
    numbers = count()

    def run(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        start = perf_counter()
        results = function(arguments)
        timeline.add(0, call, Task(next(numbers), 0, 0, 0), start, perf_counter())
        return results

    return run

"""Run fused steps: a call's device iterations, with nothing between them but the function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import ProgramError
from ipu_dynamo.profiling.private.profiler import ProfilerRow
from ipu_dynamo.program import Call, HostProgram, Plain, Receive, Send, TensorType
from ipu_dynamo.program.fused import Fused, Hyperparameters, rules_of, zeros_of
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import StagePass
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.engines.replay.replay import Replay
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.execute.describe_plan import plan_of
from ipu_dynamo.runtime.execute.error_attribution import explain
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.observer import NOBODY, Observer
from ipu_dynamo.runtime.execute.specialisations import Specialisations
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import (
    Task,
    TimedTask,
    bind_instructions,
    bind_timed_instructions,
    stages_of,
)
from ipu_dynamo.runtime.execute.tasks.task_code import Binding, TaskWriter
from ipu_dynamo.runtime.execute.timed import Interval, Timed, title_of
from ipu_dynamo.runtime.execute.transaction.commit import Commit, NothingKept

FuseAgain = Callable[[Hyperparameters], HostProgram]
_MOST = 8  # functions that are kept; a further one replaces the oldest
_STEP = RunPass(0, 0, 0)  # a fused step is one


@dataclass(slots=True)
class FusedFunction:
    """A whole step as one function, and as the one call of a micro-batch.

    Invariant: it holds the tensors of variables and none of their new values, so it serves every
    step that it `fits`. Only the last three change: each is set once, when it is found.

    Args:
        task: takes variables, hyperparameters and received values from registers, in this order.
            It leaves the new values of changing variables in the registers from `first_result` on.
        stored_tensors: the tensors of the variables that change.
        constants: the tensors of the variables that do not change.
        blank: for the registers after the hyperparameters.
        instructions, binding: the source of `task`.
        places: for each value that the function receives, its index in `streams.received`.
        fits: whether it leaves out the hyperparameters that are zero, and no others.
        checked: whether its results have had the types of their variables.
        replay: repeats it without Python between steps, or is the reason against that; None: it is
            not to be repeated.
    """

    host: HostProgram
    fused: Fused
    stage: Stage
    call: Call
    stage_pass: StagePass
    task: Task
    first_result: int
    stored_tensors: list[Tensor]
    constants: list[Tensor]
    blank: list[None]
    instructions: tuple[Plain, ...]
    binding: Binding
    places: list[int]
    fits: Callable[[Hyperparameters], bool]
    checked: bool = False
    replay: Replay | str | None = None
    timed: TimedTask | None = None

    def check(self, values: Sequence[Tensor]) -> None:
        """Check that the new values of variables have these variables' types.

        Raises:
            ProgramError: one has not. It would be read with the wrong type.
        """
        for name, stored_tensor, value in zip(
            self.fused.state, self.stored_tensors, values, strict=True
        ):
            if (old := TensorType.of(stored_tensor)) != (new := TensorType.of(value)):
                raise ProgramError(f"@{self.call.function} returned {new} for %{name}, a {old}")
        self.checked = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that is ready to run: a function, and the tensors of its hyperparameters.

    Args:
        hyperparameters: of each update group, in its rule's order.
    """

    hyperparameters: Sequence[Sequence[float]]
    function: FusedFunction
    tensors: Sequence[Tensor]


class FusedStep:
    """The steps of a host program that is fused.

    Invariant: within a call the variables' stored tensors hold their values from before it. A step
    is complete as soon as its results take the place of the variables.

    Args:
        host: what to run.
        engine: compiles the functions, one for each set of hyperparameters that are left out.
        drops: of every output, see `HostLink`.
        devices: of the IPUs.
        fuse_again: fuses the step anew when others are left out; None: they never are.

    Attributes:
        commit: makes each step complete or undone.
        functions: one for each set of hyperparameters that are left out.
    """

    def __init__(
        self,
        host: HostProgram,
        engine: Engine,
        storage: Storage,
        drops: Sequence[bool],
        devices: Sequence[torch.device],
        fuse_again: FuseAgain | None,
    ) -> None:
        program = host.inlined
        (self._call,) = program.calls
        self._host, self._program, self._engine, self._storage = host, program, engine, storage
        self._drops, self._devices, self._fuse_again = drops, devices, fuse_again
        self.commit = Commit(storage, NothingKept())
        self._rules = rules_of(program)
        self.functions = Specialisations(self._make, most=_MOST)
        self._prepared: Prepared | None = None  # for the last hyperparameters

    @property
    def prepared(self) -> Prepared:
        """Return the step that runs: for the hyperparameters that were prepared last."""
        assert self._prepared is not None
        return self._prepared

    @property
    def now(self) -> FusedFunction:
        """The function that runs."""
        return self.prepared.function

    def prepare(self, hyperparameters: Hyperparameters) -> "Prepared":
        """Return the step for these hyperparameters; compile it if they are of a new kind."""
        prepared = self._prepared
        if prepared is not None and hyperparameters == prepared.hyperparameters:
            return prepared
        values = [[float(number) for number in group] for group in hyperparameters]
        named = {
            (group, name): value
            for group, rule in self._rules.items()
            for name, value in zip(rule.hyperparameters, values[group], strict=True)
        }
        function = self.functions.choose(values)
        fused = function.fused
        taken = fused.function.inputs
        types = taken[len(taken) - len(fused.hyperparameters) :]
        tensors = [
            torch.tensor(named[pair], dtype=type_.dtype, device="cpu")
            for pair, type_ in zip(fused.hyperparameters, types, strict=True)
        ]
        prepared = Prepared([tuple(group) for group in hyperparameters], function, tensors)
        self._prepared = prepared
        return prepared

    def run(self, steps: int, streams: HostStreams, observer: Observer) -> None:
        """Run `steps` steps, each of which is reported as one task of the fused function."""
        self._run(range(steps), streams, observer)

    def plan(self) -> HostPlan:
        """Describe a step for the printed host program."""
        now = self.now
        (lines,) = TaskWriter(now.binding, [now.instructions]).texts
        first = f"r{now.first_result}"
        new = f"variables become what {first} and those behind it hold, which is the commit"
        passes = [("fused step", (*lines, new, *self._repeats()))]
        return plan_of(now.host, self._engine, self._devices, now.binding, passes)

    def _repeats(self) -> Iterator[str]:
        """How the steps of a call follow one another, unless the function is called for each."""
        yield from ()

    def _run(self, steps: range, streams: HostStreams, observer: Observer) -> None:
        """Call the function once for each step."""
        prepared, commit = self.prepared, self.commit
        now = prepared.function
        task, stored_tensors = now.task, now.stored_tensors
        frame: list[Any] = [*stored_tensors, *now.constants, *prepared.tensors, *now.blank]
        size, first = len(stored_tensors), now.first_result
        end = first + size
        received, sent = streams.received, streams.sent
        observed = observer is not NOBODY
        for step in steps:
            if observer.update_began is not None:
                observer.update_began(step, commit.current)
            start = perf_counter()
            if observer.instruction_ended is None:
                task(frame, step, received, sent)
            else:
                each = partial(Timed, observer.instruction_ended, 0, now.stage_pass, _STEP)
                timed = now.timed or bind_timed_instructions(now.binding, now.instructions)
                now.timed = timed
                with ProfilerRow(title_of(now.stage_pass)):
                    timed(frame, step, received, sent, each)
            frame[:size] = values = frame[first:end]
            if not now.checked:
                now.check(values)
            commit.rebind(stored_tensors, values)
            if observed:
                self._report(observer, now.stage_pass, step, (start, perf_counter()), streams)
            if self._storage.waiting:
                commit.settle()
                self._storage.write_waiting()
                frame[:size] = stored_tensors

    def _report(
        self, observer: Observer, of: StagePass, step: int, time: Interval, streams: HostStreams
    ) -> None:
        """Report the events of a complete step."""
        start, end = time
        if observer.received is not None:
            observer.received(step, (start, start))
        if observer.sent is not None:
            observer.sent(step, (end, end))
        if observer.task_ended is not None:
            observer.task_ended(0, of, _STEP, time)
        if observer.step_timed is not None:
            observer.step_timed(step, time)
        if observer.step_ended is not None:
            observer.step_ended(step, self.commit.current)
        if observer.iteration_ended is not None:
            observer.iteration_ended(streams, step)

    def _make(self, hyperparameters: Hyperparameters) -> FusedFunction:
        """Compile the function for these hyperparameters."""
        host, zeros = self._host, zeros_of(self._rules, hyperparameters)
        if host.fused is None or host.fused.zeros != zeros:
            assert self._fuse_again is not None, "fused for other hyperparameters"
            host = self._fuse_again(hyperparameters)
        return self._bind(host)

    def _bind(self, host: HostProgram) -> FusedFunction:
        assert host.fused is not None
        fused = host.fused
        ((recipe, stage),) = stages_of(host, self._engine.compile).values()
        hyperparameters = [f"{name} of group {group}" for group, name in fused.hyperparameters]
        arguments = (*fused.state, *fused.constants, *fused.received, *hyperparameters)
        new = [f"{name} new" for name in fused.state]
        results = [f"output {place}" for place in range(len(fused.sent))]
        own = (*fused.state, *fused.constants, *hyperparameters, *new)
        names = dict.fromkeys([*own, *fused.received, *results])
        registers = {name: register for register, name in enumerate(names)}
        call, loop = self._call, sections(self._program).loop
        whole = replace(
            call, function=fused.function.name, arguments=arguments, results=(*new, *results)
        )
        receives = [i for i in loop if isinstance(i, Receive)]
        taken = [receive for receive in receives if receive.result in registers]
        sends = [
            Send(output.name, result, call.ipu, call.source)
            for output, result in zip(self._program.outputs, results, strict=True)
        ]
        binding = Binding(
            self._program,
            registers,
            {registers[name] for name in own},
            {fused.function.name: (recipe, stage)},
            self._failure((*fused.state, *fused.constants, *fused.received)),
            received={receive.result: place for place, receive in enumerate(receives)},
            sent={o.name: (i, self._drops[i]) for i, o in enumerate(self._program.outputs)},
        )
        instructions: tuple[Plain, ...] = (*taken, whole, *sends)
        task = bind_instructions(binding, instructions)
        first = registers[new[0]]
        stored_tensors, constants = (
            [self._storage.tensor(name) for name in names]
            for names in (fused.state, fused.constants)
        )
        blank = [None] * (len(registers) - first)
        places = [binding.received[name] for name in fused.received]
        return FusedFunction(
            host, fused, stage, whole, StagePass.of(whole), task, first, stored_tensors, constants,
            blank, instructions, binding, places,
            lambda numbers: zeros_of(self._rules, numbers) == fused.zeros,
        )  # fmt: skip

    def _failure(
        self, names: Sequence[str]
    ) -> Callable[[int, Exception, Sequence[Any] | None, int], Exception]:
        """Return a function that finds a fused function's error in the function of the program."""
        call = self._call
        function = self._program.function(call.function)

        def failed(
            number: int, error: Exception, arguments: Sequence[Any] | None, step: int
        ) -> Exception:
            by_name: Mapping[str, Tensor] = dict(zip(names, arguments or (), strict=False))
            storage = self._storage
            tensors = [by_name[n] if n in by_name else storage.tensor(n) for n in call.arguments]
            return explain(error, call, function, tensors, step)

        return failed

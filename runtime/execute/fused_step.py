"""Run fused steps: a call's device iterations, with nothing between them but the function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import ProgramError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import Call, HostProgram, Plain, Receive, Send, TensorType, Update
from ipu_dynamo.program.fused import Fused, Zeros, zeros_of
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.program.schedule.schedule import Task as ScheduledTask
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.check.checked_stage import believed, plain
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.engines.replay.replay import (
    Repetition,
    Replay,
    ReplayError,
    replay_of,
)
from ipu_dynamo.runtime.engines.replay.tape import Signature
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.execute.error_attribution import explain
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams, Print, SentStream
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.observer import NOBODY, Interval, Observer
from ipu_dynamo.runtime.execute.step_end import Hyperparameters
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import Task, bind_instructions, stages_of
from ipu_dynamo.runtime.execute.tasks.task_code import Binding

SECONDS = 0.02  # of repeated steps without Python: so long a signal's handler waits
FuseAgain = Callable[[Hyperparameters], HostProgram]
_STEP = ScheduledTask(0, 0, 0)  # a fused step is one task


@dataclass(frozen=True, slots=True)
class FusedFunction:
    """A whole step as one function, and as the one call of a micro-batch.

    Args:
        task: takes variables, hyperparameters and what is received from registers, in this order,
            and leaves the new values of those that change in the registers from `first_new` on.
        homes: the tensors of the variables that change.
        constants: those of the variables that do not.
        blank: for the registers behind the hyperparameters.
        instructions, binding: what `task` does, and with what.
        places: for each value that the function receives, its index in `streams.received`.
        replay: repeats what `task` calls, or why nothing does.
    """

    host: HostProgram
    fused: Fused
    stage: Stage
    call: Call
    task: Task
    first_new: int
    homes: list[Tensor]
    constants: list[Tensor]
    blank: list[None]
    instructions: tuple[Plain, ...]
    binding: Binding
    places: list[int]
    replay: Replay | str | None

    def check(self, values: Sequence[Tensor]) -> None:
        """Check that the new values of variables have these variables' types.

        Raises:
            ProgramError: one has not. It would be read as what it is not.
        """
        for name, home, value in zip(self.fused.state, self.homes, values, strict=True):
            if (old := TensorType.of(home)) != (new := TensorType.of(value)):
                raise ProgramError(f"@{self.call.function} returned {new} for %{name}, a {old}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step runs: a function, and the tensors of its hyperparameters.

    Args:
        hyperparameters: of each update group, in its rule's order.
    """

    hyperparameters: Sequence[Sequence[float]]
    function: FusedFunction
    tensors: Sequence[Tensor]


class FusedStep:
    """The steps of a host program that is fused.

    Invariant: within a call the variables' homes hold their values from before it. A step is
    complete as soon as its results take the place of the variables.

    Args:
        host: what to run.
        engine: compiles the functions, one for each set of hyperparameters that are left out.
        drops: of every output, see `HostLink`.
        fuse_again: gives what to run when others are left out; None: they never are.
    """

    def __init__(
        self,
        host: HostProgram,
        engine: Engine,
        storage: Storage,
        drops: Sequence[bool],
        fuse_again: FuseAgain | None,
    ) -> None:
        program = host.inlined
        (self._call,) = program.calls
        self._host, self._program, self._engine, self._storage = host, program, engine, storage
        self._drops, self._fuse_again = drops, fuse_again
        self._signals = DeferredSignals()
        self._rules = {i.group: i.rule for i in program.walk() if isinstance(i, Update)}
        self._functions: dict[Zeros, FusedFunction] = {}
        self._checked: set[Zeros] = set()  # whose results have had the types of their variables
        self._prepared: Prepared | None = None  # for the last hyperparameters

    @property
    def now(self) -> FusedFunction:
        """The function for the hyperparameters of the last call, or of the first."""
        assert self._prepared is not None
        return self._prepared.function

    @property
    def completed(self) -> int:
        """Steps over all calls, also of those that failed later."""
        return self._storage.times_rebound

    def prepare(self, hyperparameters: Hyperparameters) -> "Prepared":
        """What runs with these hyperparameters, compiled if there were none like them before."""
        prepared = self._prepared
        if prepared is not None and hyperparameters == prepared.hyperparameters:
            return prepared
        values = [[float(number) for number in group] for group in hyperparameters]
        named = {
            (group, name): value
            for group, rule in self._rules.items()
            for name, value in zip(rule.hyperparameters, values[group], strict=True)
        }
        zeros = zeros_of(self._rules, values)
        if zeros not in self._functions:
            self._functions[zeros] = self._bind(self._host_for(zeros, values))
        function = self._functions[zeros]
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

    def __call__(
        self,
        hyperparameters: Hyperparameters,
        steps: int,
        streams: HostStreams,
        observer: Observer,
    ) -> None:
        """Run `steps` steps, each of which is reported as one task of the fused function.

        Raises:
            ExecutionError: an operator failed; variables are those after the last complete step.
        """
        prepared = self.prepare(hyperparameters)
        now, numbers = prepared.function, prepared.tensors
        received = (streams.received[place][0] for place in now.places)
        first = [*now.homes, *now.constants, *received, *numbers]
        made = 0
        try:
            replay = now.replay
            if isinstance(replay, Replay) and believed(now.stage) and replay.fits(first):
                made = self._repeat(prepared, steps, streams, observer)
            if made < steps:
                self._run(prepared, range(made, steps), streams, observer)
        finally:
            try:
                self._storage.write_home()
            except BaseException:  # an interrupt: the next one has to wait
                with self._signals:
                    self._storage.write_home()
                raise

    def _run(
        self, prepared: Prepared, steps: range, streams: HostStreams, observer: Observer
    ) -> None:
        """Call the function once for each step."""
        now, storage = prepared.function, self._storage
        task, homes = now.task, now.homes
        frame: list[Any] = [*homes, *now.constants, *prepared.tensors, *now.blank]
        size, first = len(homes), now.first_new
        end = first + size
        received, sent = streams.received, streams.sent
        unchecked = now.fused.zeros not in self._checked
        observed = observer is not NOBODY
        for step in steps:
            if observer.update_began is not None:
                observer.update_began(step, storage.current)
            start = perf_counter()
            task(frame, step, received, sent)
            frame[:size] = values = frame[first:end]
            if unchecked:
                now.check(values)
                self._checked.add(now.fused.zeros)
                unchecked = False
            storage.rebind(homes, values)
            if observed:
                self._report(observer, now.call, step, (start, perf_counter()), streams)
            if storage.waiting:
                storage.write_home()
                storage.write_waiting()
                frame[:size] = homes

    def _repeat(
        self, prepared: Prepared, steps: int, streams: HostStreams, observer: Observer
    ) -> int:
        """Repeat the function's calls, without Python between the steps.

        Returns:
            The number of steps made: fewer than all, if variables were written after the last one.
        """
        now, numbers, replay = prepared.function, prepared.tensors, prepared.function.replay
        assert isinstance(replay, Replay)
        homes, received = now.homes, [streams.received[place] for place in now.places]
        kept = [_kept(stream, steps) for stream in streams.sent]
        sent = list(map(_own_tensors, replay.results[len(homes) :], kept))
        steps_made = Repetition(replay, homes, now.constants, numbers, received, sent, steps)
        self._storage.follow(homes, steps_made)
        observed, ends = observer is not NOBODY, steps_made.ends
        most = 1 if observer.needs_single_steps else steps
        while (step := steps_made.steps) < steps:
            if observer.update_began is not None:
                observer.update_began(step, self._storage.current)
            began = start = perf_counter()
            try:
                steps_made.advance(min(step + most, steps), SECONDS)
            except ReplayError as error:
                values = steps_made.values
                frame: list[Any] = [*values, *now.constants, *numbers, *now.blank]
                now.task(frame, steps_made.steps, streams.received, streams.sent)  # it raises
                raise now.binding.failed(0, error, None, steps_made.steps) from error
            finally:
                for stream, made, wanted in zip(streams.sent, sent, kept, strict=True):
                    leave = stream.__setitem__ if isinstance(stream, SentStream) else stream
                    for number in range(step, steps_made.steps):
                        if wanted[number]:
                            leave(number, made[number])
            if observed:
                for number in range(step, steps_made.steps):
                    end = began + ends[number]
                    self._report(observer, now.call, number, (start, end), streams)
                    start = end
            if self._storage.waiting:
                self._storage.write_home()
                self._storage.write_waiting()
                break
        return steps_made.steps

    def _report(
        self, observer: Observer, call: Call, step: int, time: Interval, streams: HostStreams
    ) -> None:
        """Report the events of a complete step."""
        start, end = time
        if observer.received is not None:
            observer.received(step, (start, start))
        if observer.sent is not None:
            observer.sent(step, (end, end))
        if observer.task_ended is not None:
            observer.task_ended(0, call, _STEP, time)
        if observer.step_ended is not None:
            observer.step_ended(step, self._storage.current)
        if observer.iteration_ended is not None:
            observer.iteration_ended(streams, step)

    def _host_for(self, zeros: Zeros, hyperparameters: Hyperparameters) -> HostProgram:
        """What to run with these hyperparameters."""
        host = self._host
        if host.fused is None or host.fused.zeros != zeros:
            assert self._fuse_again is not None, "fused for other hyperparameters"
            host = self._fuse_again(hyperparameters)
        return host

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
        homes, constants = (
            [self._storage.tensor(name) for name in names]
            for names in (fused.state, fused.constants)
        )
        blank = [None] * (len(registers) - first)
        places = [binding.received[name] for name in fused.received]
        replay = _replay(fused, recipe, stage)
        function = FusedFunction(
            host, fused, stage, whole, task, first, homes, constants, blank, instructions, binding,
            places, replay,
        )  # fmt: skip
        if isinstance(replay, Replay):
            function.check(replay.results[: len(homes)])
        return function

    def _failure(
        self, names: Sequence[str]
    ) -> Callable[[int, Exception, Sequence[Any] | None, int], Exception]:
        """The error for that of a fused function: found in the function of the program."""
        call = self._call
        function = next(f for f in self._program.functions if f.name == call.function)

        def failed(
            number: int, error: Exception, arguments: Sequence[Any] | None, step: int
        ) -> Exception:
            by_name: Mapping[str, Tensor] = dict(zip(names, arguments or (), strict=False))
            storage = self._storage
            tensors = [by_name[n] if n in by_name else storage.tensor(n) for n in call.arguments]
            return explain(error, call, function, tensors, step)

        return failed


def _own_tensors(like: Tensor, kept: Sequence[bool]) -> list[Tensor]:
    """A tensor for every step: those that are kept have memory of their own."""
    count, shape = sum(kept), like.shape
    if count > 1 and like.is_contiguous():
        own = iter(torch.empty((count, *shape), dtype=like.dtype, device="cpu").unbind(0))
    else:
        own = iter([_empty(like) for _ in range(count)])
    dropped = _empty(like) if count < len(kept) else None
    return [next(own) if keep else dropped for keep in kept]  # type: ignore[misc]


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")


def _kept(stream: SentStream | Print, steps: int) -> Sequence[bool]:
    """Of each step, whether the call needs what it sends."""
    return stream.kept if isinstance(stream, SentStream) else [True] * steps


def _replay(fused: Fused, recipe: Recipe, stage: Stage) -> Replay | str | None:
    """What repeats a step, or why nothing does; None: it is not to be repeated."""
    if not recipe.replays:
        return None
    placeholders = recipe.lowered.graph.graph.find_nodes(op="placeholder")
    signature = Signature(
        len(fused.state),
        len(fused.constants),
        len(fused.received),
        len(fused.hyperparameters),
        len(fused.sent),
    )
    arguments = [node.meta["val"] for node in placeholders]
    return replay_of(plain(stage), arguments, signature, recipe.overwrites)

"""Bind programs to plain calls: a list of tensors in, a tuple out, nothing kept between calls."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import count as counted
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.private.thread_modes import KeptGradMode
from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.private.profiler import profiler_runs
from ipu_dynamo.program import HostProgram, Program, Receive, Send
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.ir.values import blocks
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.planning import draws, pipelined, prints, sequential
from ipu_dynamo.program.schedule.registers import number_registers
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import StagePass, calls_of_passes, stage_passes
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.call_timeline import CallTimeline
from ipu_dynamo.runtime.execute.describe_plan import described_passes, plan_of
from ipu_dynamo.runtime.execute.host_io.joined_outputs import JoinedOutput
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import (
    TimedTask,
    bind_call,
    bind_passes,
    bind_timed_passes,
    failure_of,
    stages_of,
)
from ipu_dynamo.runtime.execute.tasks.task_code import Binding
from ipu_dynamo.runtime.execute.tasks.workers import Workers
from ipu_dynamo.tune.intra_op import intra_op_threads

Boxed = Callable[[list[Any]], tuple[Any, ...]]
_next_call = counted(1).__next__


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program and a call of it.

    Args:
        run: a function on the list of arguments, which it empties. It may run in several threads.
        schedule: of its threads.
        last_call: one number, which grows with each call of any such program; 0: none yet.
    """

    host: HostProgram
    run: Boxed
    schedule: Schedule
    last_call: list[int]
    _engine: Engine
    _binding: Binding

    @property
    def ipu_schedule(self) -> Schedule:
        """The schedule of each IPU in a call."""
        return _schedule(sections(self.host.program).micro_batches, None, self.host.program)

    def plan(self) -> HostPlan:
        """How a call runs here."""
        return plan_of(
            self.host,
            self._engine,
            _devices(self._binding.program),
            self._binding,
            described_passes(self._binding),
            workers=str(self.schedule),
        )


def bind(
    host: HostProgram,
    engine: Engine,
    arguments: Sequence[str],
    constants: Sequence[Tensor],
    results: Sequence[str | float | None],
    title: str = "",
) -> BoundProgram:
    """Make a program callable.

    Args:
        host: one micro-batch per call, no update.
        arguments: names of the program's variables and input streams, in calling order; those of
            `constants` come last.
        constants: tensors that the caller does not pass.
        results: for each position of the returned tuple the name of an argument or of an output
            stream; numbers and None are returned as they are.
        title: of the calls, in traces.
    """
    program = host.inlined
    registers = number_registers(program, arguments)
    loop = sections(program).loop
    named = registers | {i.stream: registers[i.value] for i in loop if isinstance(i, Send)}
    plain = [value for value in results if not isinstance(value, str)]
    count = max(registers.values(), default=-1) + 1
    after = iter(range(count, count + len(plain)))
    returned = [named[name] if isinstance(name, str) else next(after) for name in results]
    binding = Binding(
        program,
        registers,
        {*returned},
        stages_of(host, engine.compile),
        failure_of(program),
    )
    further, last_call = [*constants, *[None] * (count - len(arguments)), *plain], [0]
    recorded = RecordedCall(binding, further, returned, title)
    run = bind_call(binding, further, returned, last_call, _next_call, recorded)
    schedule = sequential(calls_of_passes(loop), micro_batches=1)
    return BoundProgram(host, run, schedule, last_call, engine, binding)


class RecordedCall:
    """Does what `bind_call` does, pass by pass, while something records it."""

    def __init__(
        self, binding: Binding, further: Sequence[Any], results: Sequence[int], title: str
    ) -> None:
        self._binding, self._title = binding, title
        self._further, self._results = list(further), results
        passes = stage_passes(binding.program.calls)
        self._passes = [StagePass.of(calls[0]) for calls in passes]

    @cached_property
    def _tasks(self) -> list[TimedTask]:
        return bind_timed_passes(self._binding)

    def __call__(self, given: list[Any]) -> tuple[Any, ...]:
        values = given + self._further
        given.clear()
        timeline = CallTimeline(self._binding.program, self._title, to=recording.active)
        with timeline.of_call():
            if not self._passes:  # nothing is computed
                for task in self._tasks:
                    task(values, 0, (), (), lambda _: nullcontext())
            for number, of in enumerate(self._passes):
                task = partial(self._tasks[number], values, 0, (), ())
                timeline.run(0, of, RunPass(number, number, 0), task)
        return tuple(values[register] for register in self._results)


def bind_loop(
    host: HostProgram,
    engine: Engine,
    arguments: Sequence[str],
    joined: Sequence[Tensor],
    *,
    workers: int,
    title: str = "",
) -> BoundProgram:
    """Make a program callable on whole batches.

    Args:
        host: no update; its inputs are as many blocks along their `dim` as its loop runs, its
            outputs are joined along theirs, or summed.
        arguments: names of its variables and inputs, in calling order.
        joined: for each output, a tensor with shape, strides, dtype and device of the result.
        workers: threads that run IPUs side by side.
        title: of the calls, in traces.

    Returns:
        The program with a function that does not empty the list of arguments.
    """
    program, threads = host.inlined, host.threads
    registers = number_registers(program, arguments)
    loop, micro_batches = sections(program).loop, sections(program).micro_batches
    places = {stream.name: place for place, stream in enumerate(program.inputs)}
    binding = Binding(
        program,
        registers,
        set(),
        stages_of(host, engine.compile),
        failure_of(program),
        received={i.result: places[i.stream] for i in loop if isinstance(i, Receive)},
        sent={output.name: (place, False) for place, output in enumerate(program.outputs)},
    )
    tasks = bind_passes(binding)
    schedule = _schedule(micro_batches, workers, program)
    together, last_call = Workers(schedule), [0]
    timed = cache(lambda: bind_timed_passes(binding))
    blank = [None] * (max(registers.values(), default=-1) + 1 - len(arguments))
    inputs = [(registers[s.name], s.dim, s.outer) for s in program.inputs]

    def run(tensors: list[Any]) -> tuple[Any, ...]:
        last_call[0] = _next_call()
        whole = tensors + blank
        received = [blocks(whole[i], dim, outer, micro_batches) for i, dim, outer in inputs]
        frames: list[list[Any]] = [[]] * micro_batches
        with KeptGradMode(), torch.inference_mode(False), torch.no_grad():  # others write them
            sent = [
                JoinedOutput(*pair, micro_batches)
                for pair in zip(program.outputs, joined, strict=True)
            ]

        timeline, timed_tasks = None, list[TimedTask]()
        if recording.active or profiler_runs():
            timeline = CallTimeline(program, title, to=recording.active)
            timed_tasks = timed()

        def work(worker: int, run: RunPass) -> None:
            m = run.micro_batch
            if run.index == 0:
                frames[m] = whole.copy()
            if timeline is None:
                tasks[run.index](frames[m], m, received, sent)
            else:
                task = partial(timed_tasks[run.index], frames[m], m, received, sent)
                timeline.run(worker, schedule.passes[run.index], run, task)

        with intra_op_threads(threads):
            if timeline is None:
                together.run(work, threads_each=threads or torch.get_num_threads())
            else:
                with timeline.of_call():
                    together.run(work, threads_each=threads or torch.get_num_threads())
        return tuple(output.value for output in sent)

    return BoundProgram(host, run, schedule, last_call, engine, binding)


def _devices(program: Program) -> list[torch.device]:
    """Those of the functions' arguments, each once; the CPU, if they have none."""
    inputs = (n for f in program.functions for n in f.graph.graph.find_nodes(op="placeholder"))
    return [*dict.fromkeys(node.meta["val"].device for node in inputs)] or [torch.device("cpu")]


def _schedule(n: int, workers: int | None, program: Program) -> Schedule:
    """A pipeline; in turn for one worker, and for a program that draws from torch's generator or
    prints, which would depend on which worker comes first.

    Args:
        workers: None: one for each IPU.
    """
    calls = calls_of_passes(sections(program).loop)
    if workers == 1 or draws(program) or prints(program):
        return sequential(calls, micro_batches=n)
    schedule = pipelined(calls, micro_batches=n, workers=workers)
    schedule.check(program)
    return schedule

"""Bind a program to a call that runs it on one block of rows after the other, and joins results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.program import Output, Program, Send
from ipu_dynamo.program.ir.values import blocks
from ipu_dynamo.program.schedule.planning import draws, pipelined, sequential
from ipu_dynamo.program.schedule.registers import number_slots
from ipu_dynamo.program.schedule.schedule import Schedule, Task
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import as_one, turns
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.bound_calls import in_turns, prepare_steps, run_steps
from ipu_dynamo.runtime.execute.workers import run_side_by_side
from ipu_dynamo.tune.intra_op import intra_op_threads

Loop = Callable[[list[Any]], tuple[Tensor, ...]]


def bind_loop(
    program: Program,
    engine: Engine,
    arguments: Sequence[str],
    joined: Sequence[Tensor],
    *,
    workers: int,
    threads: int | None,
) -> Loop:
    """Make `program` callable on whole batches.

    Args:
        program: no update; its inputs are as many blocks along their `dim` as its loop runs, its
            outputs are joined along theirs, or summed.
        arguments: names of its variables and inputs, in calling order.
        joined: for each output, a tensor with shape, strides, dtype and device of what results.
        workers: threads that run IPUs side by side.
        threads: intra-op threads of each; None is torch's number.

    Returns:
        A function on the list of arguments. It may run in several threads.
    """
    slots = number_slots(program, arguments)
    cut = sections(program)
    micro_batches = cut.micro_batches
    sent = {i.stream: slots[i.value] for i in cut.loop if isinstance(i, Send)}
    places = [sent[output.name] for output in program.outputs]
    steps = in_turns(prepare_steps(program, engine, slots, set(places), threads))
    schedule = _schedule(micro_batches, workers, program)
    blank = [None] * (max(slots.values(), default=-1) + 1 - len(arguments))
    inputs = [(slots[s.name], s.dim, s.outer) for s in program.inputs]

    def run(given: list[Any]) -> tuple[Tensor, ...]:
        whole = given + blank
        cut = [(i, blocks(whole[i], dim, outer, micro_batches)) for i, dim, outer in inputs]
        held: list[list[Any]] = [[] for _ in range(micro_batches)]
        with torch.inference_mode(False), torch.no_grad():  # other threads write them
            results = [
                _Result(*pair, micro_batches) for pair in zip(program.outputs, joined, strict=True)
            ]

        def work(task: Task) -> None:
            m = task.micro_batch
            if task.call == 0:
                held[m] = list(whole)
                for slot, parts in cut:
                    held[m][slot] = parts[m]
            run_steps(steps[task.call], held[m], m)
            if task.call == len(steps) - 1:
                for result, place in zip(results, places, strict=True):
                    result.add(m, held[m][place])
                held[m] = []

        with intra_op_threads(threads):
            run_side_by_side(schedule, work, threads_each=threads or torch.get_num_threads())
        return tuple(result.value for result in results)

    return run


class _Result:
    """What becomes of an output: its blocks, or its sum so far.

    One worker adds all micro-batches, in their order.
    """

    def __init__(self, output: Output, like: Tensor, micro_batches: int) -> None:
        self.sums, self.shape = output.returns == "sum", like.shape
        repeated = {i for i, stride in enumerate(like.stride()) if stride == 0}
        if self.sums or output.dim in repeated:
            repeated = set()
        self.once = tuple(repeated)  # dimensions along which all elements are the same memory
        self.dense = torch.empty_strided(
            [1 if i in repeated else size for i, size in enumerate(like.shape)],
            like.stride() if repeated or 0 not in like.stride() else _row_major(like.shape),
            dtype=like.dtype,
            device=like.device,
        )
        self.dim, self.outer = output.dim, output.outer
        if not self.sums:
            repetitions = self.dense.unflatten(self.dim, (self.outer, -1))
            self.parts = repetitions.tensor_split(micro_batches, self.dim + 1)

    def add(self, micro_batch: int, value: Tensor) -> None:
        for dim in self.once:
            value = value.narrow(dim, 0, 1)
        if not self.sums:
            self.parts[micro_batch].copy_(value.unflatten(self.dim, (self.outer, -1)))
        elif micro_batch == 0:
            self.dense.copy_(value)
        else:
            self.dense += value

    @property
    def value(self) -> Tensor:
        return self.dense.expand(self.shape) if self.once else self.dense


def _row_major(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return strides[: len(shape)]


def _schedule(n: int, workers: int, program: Program) -> Schedule:
    """A pipeline; in turn for one worker, and for a program that draws from torch's generator,
    whose numbers would depend on which worker comes first."""
    calls = [as_one(turn) for turn in turns(program.calls)]
    if workers == 1 or draws(program):
        return sequential(calls, micro_batches=n)
    return pipelined(calls, micro_batches=n, workers=workers)

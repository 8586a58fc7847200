"""List the values that the stages of a training pipeline keep between their passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.types import TensorType, byte_text
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.pipeline_clock import slots, waits_of
from ipu_dynamo.program.schedule.pipeline_orders import runs_of_workers
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import stage_passes

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True, slots=True)
class Stash:
    """The values that a stage keeps of each micro-batch from one of its passes to a later one.

    Args:
        copies: micro-batches that are between its first and its last pass at once.
        values: names and types, in the order of their first use.
        here: it is kept on this computer, which stands for the IPU.
        depths: of how many micro-batches each value is kept at once. Empty: of `copies`.
    """

    stage: int
    ipu: int
    copies: int
    values: tuple[tuple[str, TensorType], ...]
    here: bool = False
    depths: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the values of all micro-batches."""
        return sum(depth * type_.nbytes for depth, (_, type_) in self._deep())

    def _deep(self) -> list[tuple[int, tuple[str, TensorType]]]:
        depths = self.depths or (self.copies,) * len(self.values)
        return list(zip(depths, self.values, strict=True))

    def __str__(self) -> str:
        where = "this computer" if self.here else f"ipu{self.ipu}"
        place = f"stage {self.stage} on {where} keeps"
        if self.copies == 1:
            return f"{place} 1 micro-batch"
        of_depth: dict[int, list[str]] = {}
        for depth, (name, type_) in self._deep():
            of_depth.setdefault(depth, []).append(f"%{name}: {type_}")
        (depth, names), *others = sorted(of_depth.items(), reverse=True) or [
            (self.copies, ["nothing"])
        ]
        rest = "".join(f", and {depth} of {', '.join(names)}" for depth, names in others)
        kept = f"{depth} micro-batches of {', '.join(names)}{rest}"
        return f"{place} {kept}; {byte_text(self.nbytes)} in all"


def stash(program: "Program") -> tuple[Stash, ...]:
    """The stash of each stage; empty, if the program is no training pipeline."""
    if program.kind != "training" or program.order == "sequential":
        return ()
    functions = {function.name: function for function in program.functions}
    variables = {variable.name for variable in program.variables}
    passes_of = stage_passes(program.calls)
    calls = [_as_call(stage_pass) for stage_pass in passes_of]
    when, runs = slots(calls), _runs(calls, program.schedule, sections(program).micro_batches)
    copies = most_kept([call.stage for call in calls], runs)

    def turn(index: int) -> tuple[int, str]:
        """Passes of one turn follow each other on a micro-batch; weight gradients may wait."""
        direction = calls[index].direction
        return when[index], direction if program.schedule or direction == "weights" else ""

    stashes = []
    for stage in sorted(copies):
        passes = [i for i, call in enumerate(calls) if call.stage == stage]
        first: dict[str, int] = {}  # the pass that has a value first
        kept: dict[str, tuple[TensorType, int]] = {}
        for i in passes:
            for call in passes_of[i]:
                types = zip(call.arguments, functions[call.function].inputs, strict=True)
                kept |= {n: (t, i) for n, t in types if n in first and turn(first[n]) != turn(i)}
            names = {name for name in (*calls[i].arguments, *calls[i].results) if name}
            first |= dict.fromkeys(names - variables - first.keys(), i)
        depths = tuple(_most_between(runs, first[name], last) for name, (_, last) in kept.items())
        values = tuple((name, type_) for name, (type_, _) in kept.items())
        ipu = calls[passes[0]].ipu
        stashes.append(Stash(stage, ipu, copies[stage], values, depths=depths))
    return tuple(stashes)


def _runs(calls: Sequence[Call], schedule: str, micro_batches: int) -> list[list[RunPass]]:
    """The passes of a step, by IPU; by slots, of enough micro-batches for the steady state."""
    if not schedule:
        micro_batches = max(micro_batches, len(calls))
    worker_of = {(0, ipu): n for n, ipu in enumerate(sorted({call.ipu for call in calls}))}
    return runs_of_workers(
        calls, waits_of(calls), worker_of, schedule=schedule, micro_batches=micro_batches
    )


def _most_between(runs: Sequence[Sequence[RunPass]], first: int, last: int) -> int:
    """How many micro-batches at most are between two passes of an IPU, both included."""
    kept = peak = 0
    for run in chain.from_iterable(runs):
        kept += run.index == first
        peak = max(peak, kept)
        kept -= run.index == last
    return peak


def most_kept(stages: Sequence[int], runs: Sequence[Sequence[RunPass]]) -> dict[int, int]:
    """For each stage, of how many micro-batches at most it keeps values for its last pass.

    Args:
        stages: of each pass of a micro-batch, in program order.
        runs: of each worker, in order.
    """
    ends = {stage: index for index, stage in enumerate(stages)}
    peak = dict.fromkeys(sorted(ends), 0)
    alive: dict[tuple[int, int], set[int]] = {}
    for of in runs:
        for run in of:
            stage = stages[run.index]
            kept = alive.setdefault((stage, run.replica), set())
            kept.add(run.micro_batch)
            peak[stage] = max(peak[stage], len(kept))
            if run.index == ends[stage]:
                kept.remove(run.micro_batch)
    return peak


def _as_call(stage_pass: Sequence[Call]) -> Call:
    """A pass as one call: it reads the values of others, and makes all results."""
    if len(stage_pass) == 1:
        return stage_pass[0]
    results = dict.fromkeys(name for call in stage_pass for name in call.results if name)
    arguments = dict.fromkeys(name for call in stage_pass for name in call.arguments)
    outside = tuple(name for name in arguments if name not in results)
    return replace(stage_pass[0], arguments=outside, results=tuple(results))

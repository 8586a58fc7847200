"""List the values that the stages of a training pipeline keep between their passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """The values that a stage keeps of each micro-batch from its forward to its backward pass.

    Args:
        copies: micro-batches of which it is kept at once.
        values: names and types, in the order of their first use.
        here: it is kept on this computer, which stands for the IPU.
    """

    stage: int
    ipu: int
    copies: int
    values: tuple[tuple[str, TensorType], ...]
    here: bool = False

    def __str__(self) -> str:
        where = "this computer" if self.here else f"ipu{self.ipu}"
        place = f"stage {self.stage} on {where} keeps"
        if self.copies == 1:
            return f"{place} 1 micro-batch"
        names = ", ".join(f"%{name}: {type_}" for name, type_ in self.values) or "nothing"
        total = byte_text(self.copies * sum(type_.nbytes for _, type_ in self.values))
        return f"{place} {self.copies} micro-batches of {names}; {total} in all"


def stash(program: "Program") -> tuple[Stash, ...]:
    """The stash of each stage; empty, if the program is no training pipeline."""
    if program.kind != "training" or program.order == "sequential":
        return ()
    functions = {function.name: function for function in program.functions}
    variables = {variable.name for variable in program.variables}
    passes_of = stage_passes(program.calls)
    calls = [_as_call(stage_pass) for stage_pass in passes_of]
    when, copies = slots(calls), _copies(calls, program.schedule, sections(program).micro_batches)
    stashes = []
    for stage in sorted({call.stage for call in calls}):
        passes = [i for i, call in enumerate(calls) if call.stage == stage]
        first, begin = calls[passes[0]], when[passes[0]]
        # with the rules by name, weight gradients keep values also in the slot of their pass
        later = [
            i
            for i in passes
            if when[i] > begin or (program.schedule and calls[i].direction != first.direction)
        ]
        turns = [i for i in passes if i not in later]
        there = {name for i in turns for name in (*calls[i].arguments, *calls[i].results)}
        there -= variables
        kept: dict[str, TensorType] = {}
        for call in (call for i in later for call in passes_of[i]):
            types = zip(call.arguments, functions[call.function].inputs, strict=True)
            kept |= {name: type_ for name, type_ in types if name in there}
        stashes.append(Stash(stage, first.ipu, copies[stage], tuple(kept.items())))
    return tuple(stashes)


def _copies(calls: Sequence[Call], schedule: str, micro_batches: int) -> dict[int, int]:
    """For each stage, of how many micro-batches it keeps values at once in the steady state."""
    if not schedule:
        micro_batches = max(micro_batches, len(calls))
    worker_of = {(0, ipu): n for n, ipu in enumerate(sorted({call.ipu for call in calls}))}
    runs = runs_of_workers(
        calls, waits_of(calls), worker_of, schedule=schedule, micro_batches=micro_batches
    )
    return most_kept([call.stage for call in calls], runs)


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

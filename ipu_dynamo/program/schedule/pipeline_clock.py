"""Say when the calls of a pipelined micro-batch run, and how many copies of a value that keeps.

Source: PopTorch user guide, "poptorch.PipelinedExecution": in a training pipeline of F forward
stages micro-batch m is in slot t of its 2F - 1 slots in cycle m + t. A value that is made in slot
t and last read in slot u lives in u - t + 1 copies: 2 (F - 1 - s) + 1 for what stage s < F - 1
keeps for its backward pass, and 1, no stash, on the last stage.

An IPU whose last slot is d before the pipeline's would be idle for d slots at the end of a step.
There it computes the weight gradients of its last d + 1 micro-batches, where these are calls of
their own, so that others get what they wait for sooner: "Zero Bubble Pipeline Parallelism" (Qi et
al., 2023), schedule H1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.types import TensorType, byte_text
from ipu_dynamo.program.schedule.stage_passes import stage_passes

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True, slots=True)
class Stash:
    """What a stage keeps of each micro-batch between its forward and its backward pass.

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


def slots(calls: Sequence[Call]) -> list[int]:
    """The slot of every call: consecutive calls of one IPU share a pipeline stage, and a slot.

    Weight gradients that were split off belong to the slot of their stage's backward pass.
    """
    positions: list[int] = []
    slot, ipu = 0, calls[0].ipu if calls else 0
    of_stage: dict[int, int] = {}
    for call in calls:
        if call.direction != "weights":
            slot, ipu = slot + (call.ipu != ipu), call.ipu
            of_stage[call.stage] = slot
        positions.append(of_stage[call.stage])
    return positions


def slots_left(calls: Sequence[Call]) -> dict[int, int]:
    """For how many slots each IPU has nothing but weight gradients to do at the end of a step."""
    when = slots(calls)
    last: dict[int, int] = {}
    for slot, call in zip(when, calls, strict=True):
        last[call.ipu] = max(last.get(call.ipu, 0), slot)
    return {ipu: max(when) - slot for ipu, slot in last.items()}


def stash(program: "Program") -> tuple[Stash, ...]:
    """What the stages keep, by stage; nothing, when the program is no training pipeline."""
    if program.kind != "training" or program.order == "sequential":
        return ()
    functions = {function.name: function for function in program.functions}
    variables = {variable.name for variable in program.variables}
    passes_of = stage_passes(program.calls)
    calls = [_as_call(stage_pass) for stage_pass in passes_of]
    when, left = slots(calls), slots_left(calls)
    stashes = []
    for stage in sorted({call.stage for call in calls}):
        passes = [i for i, call in enumerate(calls) if call.stage == stage]
        first, begin = calls[passes[0]], when[passes[0]]
        turns = [i for i in passes if when[i] == begin]  # in the first slot
        there = {name for i in turns for name in (*calls[i].arguments, *calls[i].results)}
        there -= variables
        kept: dict[str, TensorType] = {}
        for call in (call for i in passes if when[i] > begin for call in passes_of[i]):
            types = zip(call.arguments, functions[call.function].inputs, strict=True)
            kept |= {name: type_ for name, type_ in types if name in there}
        copies = 1 + when[passes[-1]] - when[passes[0]]
        if calls[passes[-1]].direction == "weights":
            copies = max(copies, 1 + left[first.ipu])
        stashes.append(Stash(stage, first.ipu, copies, tuple(kept.items())))
    return tuple(stashes)


def _as_call(stage_pass: Sequence[Call]) -> Call:
    """A pass as if it were one call: what it reads of others, and all that it makes."""
    if len(stage_pass) == 1:
        return stage_pass[0]
    results = dict.fromkeys(name for call in stage_pass for name in call.results if name)
    arguments = dict.fromkeys(name for call in stage_pass for name in call.arguments)
    outside = tuple(name for name in arguments if name not in results)
    return replace(stage_pass[0], arguments=outside, results=tuple(results))

"""Say when the calls of a pipelined micro-batch run, by the slots of PopTorch's pipelines.

Source: PopTorch user guide, "poptorch.PipelinedExecution": in a training pipeline of F forward
stages micro-batch m is in slot t of its 2F - 1 slots in cycle m + t. A value that is made in slot
t and last read in slot u lives in u - t + 1 copies: 2 (F - 1 - s) + 1 for a value that stage
s < F - 1 keeps for its backward pass, and 1, no stash, on the last stage.

An IPU whose last slot is d before the pipeline's would be idle for d slots at the end of a step. If
weight gradients are calls of their own, it computes those of its last d + 1 micro-batches there.
So other IPUs get its results sooner.
"""

from collections.abc import Sequence

from ipu_dynamo.program.ir.instructions import Call


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


def waits_of(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """For each call, the last call before it on every other IPU: with it all results are there.

    No call waits for weight gradients, and their arguments are on their own IPU.
    """
    waits: list[tuple[int, ...]] = []
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        weights = call.direction == "weights"
        waits.append(
            () if weights else tuple(sorted(i for ipu, i in last.items() if ipu != call.ipu))
        )
        if not weights:
            last[call.ipu] = index
    return waits

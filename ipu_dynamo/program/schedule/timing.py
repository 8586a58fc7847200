"""Time a schedule: when its passes would run if each kind of work took as long as every other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ipu_dynamo.program.schedule.actions import (
    Action,
    AddGradients,
    ReceiveValues,
    RunPass,
    SendValues,
    follow,
)
from ipu_dynamo.program.schedule.stage_passes import StagePass

if TYPE_CHECKING:
    from ipu_dynamo.program.schedule.schedule import Schedule

_PASSES = {"forward": 1, "backward": 2, "forward_backward": 3, "weights": 1}


def timed(
    schedule: "Schedule",
    lengths: Sequence[int] | None = None,
    delays: Sequence[int] | None = None,
) -> "Schedule":
    """The same schedule with the times of passes, and no worker that waits for a cycle's end.

    A pass starts when its worker and what that has to receive are ready. Additions take no time,
    and values of other ranks are there.

    Args:
        lengths: of each pass. None: a cycle for the forward pass, one for the gradients of inputs,
            and one for those of weights, as far as a pass computes them. A pass that repeats its
            forward pass takes one more.
        delays: from the end of a pass until a transfer has arrived, by transfer; None: 0.
    """
    lengths = lengths_of(schedule.passes) if lengths is None else lengths
    delays = [0] * len(schedule.transfers) if delays is None else delays
    sent: dict[tuple[int, int, int], int] = {}
    own = {
        (action.transfer, action.micro_batch, action.replica)
        for of in schedule.workers
        for action in of
        if isinstance(action, SendValues)
    }
    placed: list[list[Action]] = [[] for _ in schedule.workers]
    ends = [0] * len(placed)

    def place(worker: int, action: Action) -> bool:
        match action:
            case ReceiveValues(number, micro_batch, replica):
                if (number, micro_batch, replica) not in own:
                    sent[number, micro_batch, replica] = 0
                if (number, micro_batch, replica) not in sent:
                    return False
                ends[worker] = max(ends[worker], sent[number, micro_batch, replica])
            case SendValues(number, micro_batch, replica):
                sent[number, micro_batch, replica] = ends[worker] + delays[number]
            case RunPass(index=index):
                action = replace(action, cycle=ends[worker], length=lengths[index])
                ends[worker] += lengths[index]
            case AddGradients():
                pass
        placed[worker].append(action)
        return True

    follow(schedule.workers, place)
    return replace(schedule, workers=tuple(map(tuple, placed)))


def lengths_of(passes: Sequence[StagePass]) -> list[int]:
    """Cycles of every pass; without the weight gradients where they are a pass of their own."""
    split = {one.stage for one in passes if one.direction == "weights"}
    return [
        _PASSES[one.direction] - ("backward" in one.direction and one.stage in split) + one.repeats
        for one in passes
    ]

"""Time a schedule: when its calls would run if each pass took as long as every other."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ipu_dynamo.program import Call

if TYPE_CHECKING:
    from ipu_dynamo.program.schedule.schedule import Schedule, Task

_PASSES = {"forward": 1, "backward": 2, "forward_backward": 3, "weights": 1}


def timed(schedule: "Schedule") -> "Schedule":
    """The same schedule, with a cycle for each pass, and no worker that waits for a cycle's end.

    A call takes a cycle for the forward pass, one for the gradients of inputs, and one for those
    of weights, as far as it computes them. It starts when its worker and what it reads are ready.
    """
    lengths = _lengths(schedule.calls)
    ends: dict[tuple[int, int, int], int] = {}
    placed: list[list[Task]] = [[] for _ in schedule.workers]
    moved = True
    while moved:
        moved = False
        for worker, tasks in enumerate(schedule.workers):
            for task in tasks[len(placed[worker]) :]:
                needed = [(call, m, task.replica) for call, m in schedule.needs(task)]
                if not ends.keys() >= set(needed):
                    break
                before = [t.cycle + t.length for t in placed[worker][-1:]]
                cycle = max([0, *before, *(ends[key] for key in needed)])
                length = lengths[task.call]
                placed[worker].append(replace(task, cycle=cycle, length=length))
                ends[task.call, task.micro_batch, task.replica] = cycle + length
                moved = True
    return replace(schedule, workers=tuple(map(tuple, placed)))


def _lengths(calls: tuple[Call, ...]) -> list[int]:
    """Cycles of every call; without the weight gradients where they are a call of their own."""
    split = {call.stage for call in calls if call.direction == "weights"}
    return [
        _PASSES[call.direction] - ("backward" in call.direction and call.stage in split)
        for call in calls
    ]

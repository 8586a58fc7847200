"""Keep the programs that were compiled most recently, to be looked at, and trace each of them.

PyTorch's structured trace gets `ipu_program`, `ipu_decisions` and `ipu_host_plan` of each program,
and of the programs of whole steps `ipu_schedule` and `ipu_memory`, of this computer, with drawings.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from ipu_dynamo.ops.private.structured_trace import is_tracing, write_artifact
from ipu_dynamo.program import HostProgram, Program
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.schedule.schedule import Schedule


class DrawnMemory(Protocol):
    """What has a text and a drawing."""

    def svg(self) -> str:
        """The drawing."""


_LIMIT = 32
_programs: deque[Program] = deque(maxlen=_LIMIT)


def programs() -> tuple[Program, ...]:
    """The programs that were compiled most recently, through any door, oldest first, at most 32.

    A model that is trained through `torch.compile(backend="ipu")` has two: its forward and its
    backward pass. `torch._dynamo.reset()` forgets them.
    """
    return tuple(_programs)


def remember(
    host: HostProgram,
    plan: Callable[[], HostPlan] | None = None,
    schedule: Callable[[], Schedule] | None = None,
    memory: Callable[[], DrawnMemory | str] | None = None,
) -> None:
    """Keep a program that was compiled.

    Args:
        plan, schedule, memory: make the plan of this computer, the schedule of the IPUs, and the
            memory of this computer, or why it is not known; they are called only for a trace.
            Without a plan, the trace gets the listing of `host`.
    """
    _programs.append(host.program)
    if not is_tracing():
        return
    from ipu_dynamo.passes.level_text import write_level  # others do not pay for it

    bound = plan() if plan is not None else None
    decisions = host.decisions if bound is None else bound.decisions
    write_artifact("ipu_program", "string", host.program.text)
    write_artifact("ipu_decisions", "json", lambda: [*map(asdict, decisions)])
    write_artifact("ipu_host_plan", "string", lambda: str(bound or write_level(host)))
    if schedule is not None:
        write_artifact("ipu_schedule", "string", lambda: str(schedule()))
        write_artifact("ipu_schedule_drawn", "string", lambda: schedule().svg())
    if memory is not None:
        held = memory()
        write_artifact("ipu_memory", "string", lambda: str(held))
        if not isinstance(held, str):
            write_artifact("ipu_memory_drawn", "string", held.svg)


def forget() -> None:
    _programs.clear()

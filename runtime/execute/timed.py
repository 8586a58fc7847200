"""Time the instructions of tasks, with rows in PyTorch's profiler while that runs."""

import re
from collections.abc import Callable
from time import perf_counter
from types import TracebackType

from ipu_dynamo.profiling.private.profiler import ProfilerRow
from ipu_dynamo.program import (
    AllReduce,
    Call,
    Collective,
    Copy,
    Plain,
    Receive,
    ReceiveFromRank,
    ReduceScatter,
    Send,
    SendToRank,
    Update,
)
from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.stage_passes import StagePass

Interval = tuple[float, float]  # begin and end, in seconds of `time.perf_counter`
# Gets the worker, the pass and its run, the instruction and its time. Pass and run are None around
# the micro-batches of a step.
InstructionEnded = Callable[[int, StagePass | None, RunPass | None, Plain, Interval], None]
_CAPITAL = re.compile("[A-Z]")
_DIRECTIONS = {"forward_backward": "forward and backward", "weights": "weight gradients"}


def title_of(of: StagePass) -> str:
    """The name of a stage pass in traces: `stage 1 backward`."""
    return f"stage {of.stage} {_DIRECTIONS.get(of.direction, of.direction)}"


def label_of(instruction: Plain) -> str:
    """The name of an instruction in traces: `copy %h to IPU 1`."""
    match instruction:
        case Call(function=name):
            return f"call @{name}"
        case Receive(stream=stream):
            return f"receive {stream} from the host"
        case Send(stream=stream):
            return f"send {stream} to the host"
        case Copy(value=name, dst=ipu):
            return f"copy %{name} to IPU {ipu}"
        case SendToRank(value=name, to=ipu):
            return f"send %{name} to the rank of IPU {ipu}"
        case ReceiveFromRank(result=name, origin=ipu):
            return f"receive %{name} from the rank of IPU {ipu}"
        case AllReduce(values=names) | ReduceScatter(values=names):
            how = "all_reduce" if isinstance(instruction, AllReduce) else "reduce_scatter"
            return f"{how} {counted(len(names), 'tensor')} of replicas"
        case Collective(kind=kind, value=name):
            return f"{kind} %{name} of replicas"
        case Update(parameters=names, group=group):
            return f"update {counted(len(names), 'parameter')} of group {group}"
        case _:
            words = _CAPITAL.sub(r" \g<0>", type(instruction).__name__).strip().lower()
            return " ".join((words, *(f"%{move.value}" for move in instruction.moves[:1])))


class Timed:
    """A block in which an instruction runs; an error in it has no time."""

    __slots__ = ("_ended", "_instruction", "_of", "_row", "_run", "_start", "_worker")

    def __init__(
        self,
        ended: InstructionEnded,
        worker: int,
        of: StagePass | None,
        run: RunPass | None,
        instruction: Plain,
    ) -> None:
        self._ended, self._worker, self._of, self._run = ended, worker, of, run
        self._instruction, self._row = instruction, ProfilerRow(label_of(instruction))
        self._start = 0.0

    def __enter__(self) -> None:
        self._row.__enter__()
        self._start = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        interval = self._start, perf_counter()
        self._row.__exit__(kind, error, traceback)
        if error is None:
            self._ended(self._worker, self._of, self._run, self._instruction, interval)

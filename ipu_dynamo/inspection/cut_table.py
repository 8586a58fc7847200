"""Say how a model was cut into stages: a table with a row for each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ipu_dynamo.program import Program, Variable
from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.made_names import owner_of
from ipu_dynamo.program.ir.types import byte_text, columns
from ipu_dynamo.program.schedule.estimated_times import seconds_of_passes
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import stage_passes
from ipu_dynamo.runtime.execute.timeline import Timeline

_OF_LAYERS = ("parameter", "buffer")


@dataclass(frozen=True, slots=True)
class CutRow:
    """A stage.

    Args:
        layers: paths of the modules that have its parameters and buffers, in their order.
        milliseconds: of a micro-batch, forward and backward, on this computer.
        nbytes: of its variables and its stash on the IPU.
        idle: share of a step in which its IPU waits, by its schedule.
    """

    stage: int
    ipu: int
    layers: tuple[str, ...]
    milliseconds: float
    nbytes: int
    idle: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of a table's row, in the order of the fields."""
        return (
            str(self.stage),
            f"ipu{self.ipu}",
            _shortened(self.layers),
            f"{self.milliseconds:.3g}",
            byte_text(self.nbytes),
            f"{self.idle:.0%}",
        )


@dataclass(frozen=True, slots=True)
class CutTable:
    """The stages of a program.

    Args:
        measured: whether milliseconds are those of a recorded call; otherwise they are estimates
            for one core, by bytes and FLOPs.
    """

    rows: tuple[CutRow, ...]
    measured: bool

    @property
    def headings(self) -> tuple[str, ...]:
        """Of the columns; the title of a column says whose figures it has."""
        how = "measured" if self.measured else "estimated"
        time = f"ms ({how}, this computer)"
        return "stage", "IPU", "layers", time, "bytes (IPU)", "idle share (IPU)"

    def __str__(self) -> str:
        return "\n".join(columns([self.headings, *(row.cells for row in self.rows)]))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cut_table(program: Program, schedule: Schedule, timeline: Timeline | None) -> CutTable:
    """Describe the stages of a program.

    Args:
        schedule: of its IPUs.
        timeline: of a recorded call on this computer; None: milliseconds are estimated.
    """
    calls = [i for i in sections(program).loop if isinstance(i, Call)]
    ipus = {call.stage: call.ipu for call in calls}
    of_stage = variables_of_stages(program, calls)
    stash = Counter[int]()
    for kept in program.stash:
        stash[kept.stage] += kept.nbytes
    seconds = _estimated(program) if timeline is None else _measured(timeline)
    idle = _idle_shares(schedule)
    rows = tuple(
        CutRow(
            stage,
            ipu,
            tuple(dict.fromkeys(_module(v.name) for v in of_stage[stage] if v.kind in _OF_LAYERS)),
            1e3 * seconds.get(stage, 0.0),
            stash[stage] + sum(v.held.nbytes for v in of_stage[stage] if not v.off_chip),
            idle.get(ipu, 0.0),
        )
        for stage, ipu in sorted(ipus.items())
    )
    return CutTable(rows, timeline is not None)


def variables_of_stages(program: Program, calls: Sequence[Call]) -> dict[int, list[Variable]]:
    """Each variable with the first stage on its IPU that reads it or its parameter.

    If no call reads a variable, it is with the first stage on its IPU.
    """
    first: dict[tuple[str, int], int] = {}
    for call in calls:
        for name in call.arguments:
            first.setdefault((name, call.ipu), call.stage)
    stages: dict[int, list[int]] = {}
    for call in calls:
        stages.setdefault(call.ipu, []).append(call.stage)
    found: dict[int, list[Variable]] = {call.stage: [] for call in calls}
    for variable in program.variables:
        names = (variable.name, owner_of(variable.name))
        reading = (first[name, variable.ipu] for name in names if (name, variable.ipu) in first)
        alone = min(stages.get(variable.ipu, [*found]), default=None)
        stage = next(reading, alone)
        if stage is not None:
            found[stage].append(variable)
    return found


def _estimated(program: Program) -> dict[int, float]:
    """Seconds of each stage for a micro-batch."""
    seconds: dict[int, float] = {}
    for calls, time in zip(stage_passes(program.calls), seconds_of_passes(program), strict=True):
        stage = calls[0].stage
        seconds[stage] = seconds.get(stage, 0.0) + time
    return seconds


def _measured(timeline: Timeline) -> dict[int, float]:
    """Mean seconds of each stage for a micro-batch."""
    seconds: dict[int, float] = {}
    micro_batches = {(span.replica, span.micro_batch) for span in timeline.spans}
    for span in timeline.spans:
        seconds[span.stage] = seconds.get(span.stage, 0.0) + span.end - span.start
    return {stage: time / len(micro_batches) for stage, time in seconds.items()}


def _idle_shares(schedule: Schedule) -> dict[int, float]:
    """Share of a step in which each IPU has nothing to do."""
    timed = schedule.timed()
    busy, replicas = Counter[int](), set[int]()
    for runs in timed.runs:
        for run in runs:
            busy[timed.passes[run.index].ipu] += run.length
            replicas.add(run.replica)
    # one worker alone runs replica after replica, which IPUs run side by side
    cycles = timed.cycles * (len(replicas) if len(timed.workers) > 1 else 1)
    return {ipu: 1 - length / cycles for ipu, length in busy.items()}


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _shortened(layers: Sequence[str]) -> str:
    if len(layers) > 3:
        return f"{layers[0]} ... {layers[-1]} ({len(layers)})"
    return ", ".join(layers) or "-"

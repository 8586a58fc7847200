"""Draw schedules as an SVG picture that stands alone: a row per worker, a box per stage pass.

A stage has a hue, and each kind of work a shade of it. Several schedules share one time axis.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.program.schedule.actions import AddGradients, ReceiveValues, RunPass
from ipu_dynamo.program.schedule.stage_passes import StagePass
from ipu_dynamo.program.schedule.timing import lengths_of
from ipu_dynamo.svg_picture import (
    CHARACTER,
    FONT,
    GROUND,
    IDLE,
    ON_DARK_BOX,
    ON_LIGHT_BOX,
    QUIET,
    Picture,
    frame,
    picture,
    rect,
    text,
    titled,
)

if TYPE_CHECKING:
    from ipu_dynamo.program.schedule.schedule import Schedule

_BOX, _GAP, _MARGIN, _LINE = 26, 4, 12, 22  # pixels
_NARROW, _SMALL = 6, 10  # pixels: the width of a character in a narrow box, and its font
_AXIS, _LONGEST_AXIS = 1500, 6000  # pixels: wanted, and at most
_SHORTEST_PASS = 14  # pixels
_TICKS = 12  # on an axis, at most
_HUES = 16  # after so many stages they come again, less saturated
_LIGHTNESS = {"forward": 0.8, "repeated": 0.9, "backward": 0.62, "weights": 0.38}
_WORDS = {
    "forward": "forward",
    "repeated": "forward, repeated",
    "backward": "backward",
    "weights": "weight gradients",
}


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where cycles are on the common axis.

    Args:
        start: pixels from the axis' begin, for each cycle from 0 to `cycles`.
        columns: several boxes of a worker may be in one cycle, next to each other.
    """

    cycles: int
    start: Callable[[int], float]
    columns: bool = False

    @property
    def end(self) -> float:
        return self.start(self.cycles)

    def box(self, run: RunPass, before: int) -> tuple[float, float]:
        """Begin and width of a box that has so many before it in its cycle."""
        begin = self.start(run.cycle)
        width = self.start(run.cycle + run.length) - begin
        if not self.columns:
            return begin, width
        return begin + before * _BOX, _BOX if run.length == 1 else width - _GAP


def draw(schedule: "Schedule", *, cycles: bool) -> Picture:
    """Draw a schedule; see `Schedule.svg`."""
    panels = [("", schedule if cycles else schedule.timed())]
    if cycles and all(run.length == 1 for of in schedule.runs for run in of):
        return _picture(panels, _columns(schedule), "cycles of the lock-step")
    return _picture(panels, _time(panels), "cycles of time")


def draw_several(schedules: Mapping[str, "Schedule"]) -> Picture:
    """Draw the times of schedules with titles on one axis."""
    timed = [(title, schedule.timed()) for title, schedule in schedules.items()]
    return _picture(timed, _time(timed), "cycles of time")


def _time(panels: Sequence[tuple[str, "Schedule"]]) -> _Axis:
    """A scale for all panels, on which the shortest pass has room for a number, if possible."""
    cycles = max([1, *(schedule.cycles for _, schedule in panels)])
    lengths = [run.length for _, schedule in panels for of in schedule.runs for run in of]
    least = min(_SHORTEST_PASS / min(lengths, default=1), _LONGEST_AXIS / cycles)
    scale = min(_BOX + _GAP, max(_AXIS / cycles, least))
    return _Axis(cycles, lambda cycle: cycle * scale)


def _columns(schedule: "Schedule") -> _Axis:
    """Columns that are as wide as the most boxes of a worker in a cycle."""
    wide = [1] * schedule.cycles
    for runs in schedule.runs:
        for cycle, count in Counter(run.cycle for run in runs).items():
            wide[cycle] = max(wide[cycle], count)
    starts = [before * _BOX + i * _GAP for i, before in enumerate(accumulate([0, *wide]))]
    return _Axis(schedule.cycles, lambda cycle: starts[cycle], columns=True)


def _picture(panels: Sequence[tuple[str, "Schedule"]], axis: _Axis, unit: str) -> Picture:
    """Draw panels with titles from top to bottom, then the axis and the legend of shades."""
    rows = [row for _, schedule in panels for row in schedule.rows]
    left = 2 * _MARGIN + CHARACTER * max(map(len, rows), default=0)
    right, y = left + axis.end + _MARGIN, float(_MARGIN)
    parts, width = list[str](), right
    for title, schedule in panels:
        heading = f"{schedule.idle:.1%} idle, {counted(schedule.timed().cycles, 'cycle')} of time"
        parts.append(text(_MARGIN, y + 14, f"{title}: {heading}" if title else heading, bold=True))
        y += _LINE
        for row, name in enumerate(schedule.rows):
            parts.append(text(_MARGIN, y + _BOX - 8, name))
            parts.append(rect(left, y, axis.start(schedule.cycles), _BOX, IDLE))
            parts += _boxes(schedule, row, axis, left, y)
            keys, end = _keys(schedule, row, right, y)
            parts += keys
            width, y = max(width, end), y + _BOX + _GAP
        y += _MARGIN
    for cycle in _ticks(axis.cycles):
        x = left + axis.start(cycle)
        parts.append(rect(x, y - _MARGIN, 1, 6, QUIET))
        parts.append(text(x, y + 10, str(cycle), "middle"))
    y += _LINE
    legend, end = _legend(panels, unit, y)
    width, height = max(width, end) + _MARGIN, y + 2 * _LINE
    passes = sum(len(runs) for _, schedule in panels for runs in schedule.runs)
    workers = sum(len(schedule.workers) for _, schedule in panels)
    of_all = (counted(passes, "pass", "passes"), counted(workers, "worker"))
    title = f"{' on '.join(of_all)} in {counted(axis.cycles, 'cycle')}"
    return picture(width, height, title, [*parts, *legend])


def _boxes(schedule: "Schedule", row: int, axis: _Axis, left: float, y: float) -> Iterator[str]:
    """A box for each run of a worker. Pointing at it shows the call and the values it waits for."""
    notes, lengths, before = _notes(schedule, row), lengths_of(schedule.passes), Counter[int]()
    for run in schedule.runs[row]:
        of = schedule.passes[run.index]
        x, width = axis.box(run, before[run.cycle])
        before[run.cycle] += 1
        title = (
            f"@{of.function} on ipu{of.ipu}, stage {of.stage}, micro-batch {run.micro_batch}, "
            f"replica {run.replica}, cycle {run.cycle}{notes[run]}: {of.source}"
        )
        place, parts = left + x, []
        for kind, share in _work(of, lengths[run.index]):
            here = share * width
            parts.append(rect(place, y, here, _BOX, stage_colour(of.stage, kind)))
            place += here
        parts.append(frame(left + x, y, width, _BOX, GROUND))
        number = str(run.micro_batch)
        narrow = CHARACTER * len(number) >= here
        if _NARROW * len(number) < width:
            middle = place - (here if _NARROW * len(number) < here else width) / 2
            fill = ON_DARK_BOX if of.direction == "weights" else ON_LIGHT_BOX
            size = _SMALL if narrow else FONT
            parts.append(text(middle, y + _BOX - 8, number, "middle", fill=fill, size=size))
        yield titled(title, parts)


def _work(of: StagePass, length: int) -> list[tuple[str, float]]:
    """The kinds of work in a pass, each with its share of the time."""
    if of.direction in ("forward", "weights"):
        return [(of.direction, 1.0)]
    before = ["forward"] * (of.direction == "forward_backward") + ["repeated"] * of.repeats
    rest = length - len(before)
    return [*((kind, 1 / length) for kind in before), ("backward", rest / length)]


def _notes(schedule: "Schedule", row: int) -> dict[RunPass, str]:
    """For each pass of a worker, the values it waits for and the actions with its gradients."""
    notes: dict[RunPass, str] = {}
    waits: list[str] = []
    last: RunPass | None = None
    for action in schedule.workers[row]:
        match action:
            case ReceiveValues(transfer=number):
                transfer = schedule.transfers[number]
                values = [f"%{name}" for name in transfer.values]
                what = ", ".join(values[:3]) + (", ..." if values[3:] else "")
                source = f"{schedule.names[transfer.source]}{action.micro_batch}"
                waits.append(f"; waits for {what} of {source}" if what else f"; after {source}")
            case RunPass():
                notes[action], waits, last = "".join(waits), [], action
            case AddGradients() if last is not None:
                notes[last] += "".join([*waits, "; then adds its gradients"])
                waits = []
    return notes


def _keys(schedule: "Schedule", row: int, x: float, y: float) -> tuple[list[str], float]:
    """The colours and the stash of a worker's stages, and where their line ends."""
    stash, name = schedule.stash(), schedule.rows[row]
    trains = any(one.direction != "forward" for one in schedule.passes)
    stages = dict.fromkeys(schedule.passes[run.index].stage for run in schedule.runs[row])
    parts = []
    for stage in sorted(stages):
        here = [one for one in schedule.passes if one.stage == stage]
        kinds = {kind for one in here for kind, _ in _work(one, 4)}
        for kind in (kind for kind in _WORDS if kind in kinds):
            parts.append(rect(x, y + 6, 10, 14, stage_colour(stage, kind)))
            x += 10
        words = f"stage {stage}"
        words += "" if name.startswith("ipu") else f" on ipu{here[0].ipu}"
        words += f" keeps {stash[stage]}" if trains else ""
        parts.append(text(x + 6, y + _BOX - 8, words))
        x += 6 + CHARACTER * (len(words) + 2)
    return parts, x


def _legend(
    panels: Sequence[tuple[str, "Schedule"]], unit: str, y: float
) -> tuple[list[str], float]:
    """A line that explains shades and numbers, and where it ends."""
    passes = {one for _, schedule in panels for one in schedule.passes}
    kinds = {kind for one in passes for kind, _ in _work(one, 4)}
    shown = [(stage_colour(0, kind), words) for kind, words in _WORDS.items() if kind in kinds]
    shown.append((IDLE, "nothing to do"))
    parts, x = [], float(_MARGIN)
    for colour, words in shown:
        parts += [rect(x, y, 14, 14, colour), text(x + 20, y + 12, words)]
        x += 20 + CHARACTER * (len(words) + 2)
    note = f"numbers in boxes: micro-batches; keeps: micro-batches in the stash; axis: {unit}"
    parts.append(text(_MARGIN, y + _LINE + 12, note))
    return parts, max(x, _MARGIN + CHARACTER * len(note))


def _ticks(cycles: int) -> range:
    """Round numbers of cycles, at most `_TICKS` of them."""
    step = next(
        step
        for zeros in range(len(str(cycles)) + 1)
        for step in (10**zeros, 2 * 10**zeros, 5 * 10**zeros)
        if cycles // step < _TICKS
    )
    return range(0, cycles + 1, step)


def stage_colour(stage: int, kind: str) -> str:
    """The shade of a kind of work. Neighbouring stages have hues far from each other."""
    hue = stage * 7 % _HUES / _HUES + 0.58
    saturation = 0.75 / (1 + stage // _HUES)
    rgb = hls_to_rgb(hue % 1, _LIGHTNESS[kind], saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)

"""Draw a schedule as an SVG picture that stands alone."""

from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from ipu_dynamo.program import Direction
from ipu_dynamo.program.schedule.actions import AddGradients, ReceiveValues, RunPass
from ipu_dynamo.program.schedule.stage_passes import StagePass

if TYPE_CHECKING:
    from ipu_dynamo.program.schedule.schedule import Schedule

_BOX, _GAP, _MARGIN, _LINE = 26, 4, 12, 22  # pixels
_CHARACTER = 8  # width of a character of the row names
_HUES: dict[Direction, tuple[str, int]] = {
    "forward": ("forward", 210),
    "backward": ("backward", 28),
    "forward_backward": ("forward and backward", 140),
    "weights": ("weight gradients", 275),
}


def draw(schedule: "Schedule") -> str:
    """A row per worker, a column per cycle, a box per pass with the number of its micro-batch.

    A box's hue is its direction, its lightness the stage; pointing at it shows the call, what it
    waits for, and whether gradients are added behind it.
    """
    cells: dict[tuple[int, int], list[RunPass]] = {}
    taken: set[tuple[int, int]] = set()
    for worker, runs in enumerate(schedule.runs):
        for run in runs:
            cells.setdefault((worker, run.cycle), []).append(run)
            taken |= {(worker, run.cycle + i) for i in range(run.length)}
    notes = _notes(schedule)
    wide = [1] * schedule.cycles  # boxes side by side in a column
    for (_, cycle), here in cells.items():
        wide[cycle] = max(wide[cycle], len(here))
    left = 2 * _MARGIN + _CHARACTER * max((len(row) for row in schedule.rows), default=0)
    starts = [
        left + before * _BOX + i * _GAP for i, before in enumerate(accumulate([0, *wide[:-1]]))
    ]
    parts = []
    for row, name in enumerate(schedule.rows):
        y = _MARGIN + row * (_BOX + _GAP)
        parts.append(_text(_MARGIN, y + _BOX - 8, name))
        for cycle, start in enumerate(starts):
            here = cells.get((row, cycle), [])
            parts += [
                _box(start + i * _BOX, y, schedule.passes[run.index], run, notes[run])
                for i, run in enumerate(here)
            ]
            if (row, cycle) not in taken:
                width = wide[cycle] * _BOX
                parts.append(
                    f'<rect x="{start}" y="{y}" width="{width}" height="{_BOX}" fill="#eee"/>'
                )
    top = _MARGIN + len(schedule.rows) * (_BOX + _GAP) + _LINE
    legend = _legend(schedule, top)
    right = left + sum(wide) * _BOX + len(wide) * _GAP
    width = max(right, 2 * _MARGIN + 60 * _CHARACTER) + _MARGIN
    height = top + len(legend) * _LINE + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" font-family="monospace" '
            f'font-size="13">',
            f"<title>{_title(schedule)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            *legend,
            "</svg>",
        ]
    )


def _title(schedule: "Schedule") -> str:
    passes = sum(map(len, schedule.runs))
    return f"{passes} passes on {len(schedule.workers)} workers in {schedule.cycles} cycles"


def _notes(schedule: "Schedule") -> dict[RunPass, str]:
    """What each pass waits for, and what is done with its gradients."""
    notes: dict[RunPass, str] = {}
    for actions in schedule.workers:
        waits: list[str] = []
        last: RunPass | None = None
        for action in actions:
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


def _box(x: int, y: int, of: StagePass, run: RunPass, note: str) -> str:
    width = run.length * (_BOX + _GAP) - _GAP
    title = (
        f"@{of.function} on ipu{of.ipu}, stage {of.stage}, micro-batch {run.micro_batch}, "
        f"replica {run.replica}, cycle {run.cycle}{note}: {of.source}"
    )
    return (
        f'<g><title>{escape(title)}</title><rect x="{x}" y="{y}" width="{width}" height="{_BOX}" '
        f'fill="{_colour(of)}" stroke="white"/>'
        f"{_text(x + width // 2, y + _BOX - 8, str(run.micro_batch), 'middle')}</g>"
    )


def _colour(of: StagePass) -> str:
    """The direction's hue; neighbouring stages alternate in lightness."""
    return f"hsl({_HUES[of.direction][1]},70%,{82 - 14 * (of.stage % 3)}%)"


def _legend(schedule: "Schedule", top: int) -> list[str]:
    """A line per pass, with its colour, and one that explains the grey cells."""
    lines = [
        (
            _colour(of),
            f"stage {of.stage} on ipu{of.ipu}: {_HUES[of.direction][0]}, @{of.function}",
        )
        for of in schedule.passes
    ]
    lines.append(("#eee", "nothing to do; columns are cycles, numbers are micro-batches"))
    return [
        f'<rect x="{_MARGIN}" y="{top + i * _LINE}" width="14" height="14" fill="{colour}"/>'
        + _text(_MARGIN + 22, top + i * _LINE + 12, text)
        for i, (colour, text) in enumerate(lines)
    ]


def _text(x: int, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'

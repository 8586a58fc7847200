"""Draw a program as an SVG picture: a lane for each IPU, a box for each call, arrows for moves."""

from collections.abc import Sequence

from ipu_dynamo.program.ir.base_instruction import Moved, Place
from ipu_dynamo.program.ir.instructions import Call, Instruction, Plain, Repeat
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.types import TensorType, counted
from ipu_dynamo.program.schedule.drawing import stage_colour
from ipu_dynamo.svg_picture import (
    CHARACTER,
    GROUND,
    IDLE,
    ON_DARK_BOX,
    ON_LIGHT_BOX,
    QUIET,
    TEXT,
    Picture,
    frame,
    picture,
    rect,
    text,
    titled,
)

_LANE, _BOX_WIDTH, _BOX, _ROW, _MARGIN = 190, 150, 22, 28, 12  # pixels
_HEAD, _INDENT, _ARROW = 40, 6, 6  # pixels
_LETTERS = (_LANE - 2 * _MARGIN) // CHARACTER  # of a label


def draw_program(program: object) -> Picture:
    """Draw the instructions of a program from top to bottom.

    Each IPU has a lane, as have the host, streaming memory and other replicas if values come from
    there. A call is a box in the colour of its stage, as in schedules. Writes and updates are grey.
    Pointing at something shows the instruction.

    Args:
        program: a `Program`, or an object that has one as its `program`, such as a compiled model.

    Returns:
        The text of an SVG picture. A notebook shows it as a picture. Its `dark()` is the same for
        a dark page.

    Raises:
        TypeError: it is no program and has none.
    """
    what = getattr(program, "program", program)
    if not isinstance(what, Program):
        raise TypeError(
            f"draw_program cannot draw a {type(program).__name__}; give the step of "
            "compile_training after its first call, or its `program`"
        )
    return _Drawing(what).picture()


class _Drawing:
    """The parts of a picture, which grow downwards.

    Args:
        parts: so far, the last one in front.
        y: pixels from the top to the next row.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parts: list[str] = []
        self.y = float(_MARGIN + _HEAD)
        moved = [move for i in program.walk() if not isinstance(i, Repeat) for move in i.moves]
        used = {place for move in moved for place in (move.src, move.dst)}
        others: list[Place] = [place for place in ("off chip", "replicas") if place in used]
        self.lanes: list[Place] = ["host", *range(program.num_ipus), *others]
        self.types = {variable.name: variable.type for variable in program.variables}
        self.types |= {stream.name: stream.type for stream in program.inputs}
        self.types |= {stream.name: stream.type for stream in program.outputs}

    @property
    def width(self) -> float:
        return 2 * _MARGIN + _LANE * len(self.lanes)

    def middle(self, place: Place) -> float:
        """The middle of a lane."""
        return _MARGIN + _LANE * (self.lanes.index(place) + 0.5)

    def picture(self) -> Picture:
        self.draw(self.program.body, 0)
        behind = []
        for place in self.lanes:
            name = f"ipu{place}" if isinstance(place, int) else place
            behind.append(text(self.middle(place), _MARGIN + 14, name, "middle", bold=True))
            behind.append(rect(self.middle(place), _MARGIN + 24, 1, self.y - _MARGIN - 24, IDLE))
        calls, ipus = len(self.program.calls), self.program.num_ipus
        title = f"{counted(calls, 'call')} on {counted(ipus, 'IPU')}"
        return picture(self.width, self.y + _MARGIN, title, [*behind, *self.parts])

    def draw(self, body: Sequence[Instruction], depth: int) -> None:
        """Draw instructions below each other; those of a loop have a frame."""
        for instruction in body:
            if not isinstance(instruction, Repeat):
                self.row(instruction)
                continue
            top, left = self.y, _MARGIN + depth * _INDENT
            self.parts.append(text(left + _INDENT, top + 16, str(instruction)))
            self.y += _ROW
            self.draw(instruction.body, depth + 1)
            self.y += _INDENT
            outline = frame(left, top, self.width - 2 * left, self.y - top - 2, QUIET)
            self.parts.append(outline)
            self.y += _INDENT

    def row(self, instruction: Plain) -> None:
        """Draw an arrow for moves from place to place, or a box."""
        ways: dict[tuple[Place, Place], list[Moved]] = {}
        for move in instruction.moves:
            ways.setdefault((move.src, move.dst), []).append(move)
        for (src, dst), moves in ways.items():
            first = moves[0]
            name = first.result if src == "host" else first.value
            type_ = first.type or self.types.get(first.value) or self.types.get(first.result)
            self.arrow(src, dst, _label(name, type_, len(moves)), str(instruction))
        if ways:
            return
        for ipu in instruction.ipus:
            x = self.middle(ipu) - _BOX_WIDTH / 2
            self.parts.append(titled(str(instruction), _box(instruction, x, self.y)))
        self.y += _ROW

    def arrow(self, src: Place, dst: Place, label: str, title: str) -> None:
        """Draw an arrow with its label above it."""
        start, end = self.middle(src), self.middle(dst)
        back = _ARROW if end > start else -_ARROW
        y = self.y + _BOX
        head = f"M{end:g} {y:g} L{end - back:g} {y - 4:g} L{end - back:g} {y + 4:g} Z"
        middle = (start + end) / 2 if abs(end - start) <= _LANE else end - back / _ARROW * _LANE / 2
        wide = CHARACTER * len(label)
        parts = [
            rect(min(start, end), y - 1, abs(end - start), 2, TEXT),
            f'<path d="{head}" fill="{TEXT}"/>',
            rect(middle - wide / 2, y - 18, wide, 14, GROUND),
            text(middle, y - 6, label, "middle"),
        ]
        self.parts.append(titled(title, parts))
        self.y += _ROW + 2


def _box(instruction: Plain, x: float, y: float) -> list[str]:
    """A call in the shades of its passes, or the first word of another instruction."""
    if not isinstance(instruction, Call):
        word = str(instruction).split()[0]
        words = text(x + _BOX_WIDTH / 2, y + 15, word, "middle")
        return [rect(x, y, _BOX_WIDTH, _BOX, IDLE), words]
    both = instruction.direction == "forward_backward"
    kinds = ["forward", "backward"] if both else [instruction.direction]
    share = _BOX_WIDTH / len(kinds)
    name = f"@{instruction.function}"[:_LETTERS]
    fill = ON_DARK_BOX if instruction.direction == "weights" else ON_LIGHT_BOX
    return [
        *(
            rect(x + i * share, y, share, _BOX, stage_colour(instruction.stage, kind))
            for i, kind in enumerate(kinds)
        ),
        text(x + _BOX_WIDTH / 2, y + 15, name, "middle", fill=fill),
    ]


def _label(name: str, type_: TensorType | None, count: int) -> str:
    """Name and type of the moved value, shortened to the room between two lanes."""
    more = f" and {count - 1} more" if count > 1 else f" {type_}" if type_ else ""
    room = max(_LETTERS - len(more) - 1, 4)
    short = name if len(name) <= room else f"{name[: room - 2]}.."
    return f"%{short}{more}"

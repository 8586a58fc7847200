"""Show the memory of this computer during the micro-batches of a step, for each stage.

Categories are those of the machine model, which shows the memory of an IPU.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ipu_dynamo.inspection.followed_memory import (
    FollowedStep,
    FollowedStorage,
    follow_memory,
)
from ipu_dynamo.program import HostProgram
from ipu_dynamo.program.ir.types import byte_text, columns
from ipu_dynamo.program.liveness.follow_program import ROLE_OF
from ipu_dynamo.program.liveness.live_tensors import CATEGORIES, CATEGORY_OF, CategoryName
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.svg_picture import SERIES, Picture, picture, rect, text

_COLOURS = dict(zip(CATEGORIES, SERIES, strict=True))
_WIDTH, _HEIGHT, _LINE = 720, 120, 18  # pixels


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage that is live at a step.

    Args:
        source: the user's line that makes it; empty: it is no operator's result.
    """

    name: str
    nbytes: int
    stage: int
    category: CategoryName
    source: str = ""

    def __str__(self) -> str:
        line = f"  # {self.source}" if self.source else ""
        return f"{byte_text(self.nbytes):>10}  {self.category}: %{self.name}{line}"


@dataclass(frozen=True)
class HostMemory:
    """Bytes on this computer at each step of the micro-batches of the first step of a call.

    With the eager engine a step is an operator, and bytes are those of the storages of tensors.
    A function that is machine code is one step, marked `inside @forward0`: what its code
    allocates is left out.

    Args:
        steps: in the order in which they run.
        storages: of values, and when they are there.
        variables: bytes by stage and category, all the time.
    """

    steps: tuple[FollowedStep, ...]
    storages: tuple[FollowedStorage, ...]
    variables: Mapping[int, Mapping[CategoryName, int]]

    @classmethod
    def of(
        cls,
        host: HostProgram,
        schedule: Schedule,
        variables: Mapping[int, Sequence[tuple[str, int]]],
    ) -> "HostMemory":
        """Follow a program.

        Args:
            variables: kind and bytes of those of each stage.
        """
        steps, storages = follow_memory(host, schedule)
        held: dict[int, Counter[CategoryName]] = {}
        for stage, of in variables.items():
            held[stage] = Counter()
            for kind, nbytes in of:
                held[stage][CATEGORY_OF[ROLE_OF[kind]]] += nbytes
        return cls(tuple(steps), tuple(storages), held)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages, in order."""
        return tuple(sorted(self.variables))

    def held(self, step: int, stage: int | None = None) -> tuple[LiveStorage, ...]:
        """The values in memory at a step, the largest first.

        Args:
            step: its place in `steps`.
            stage: that has made them; None: all.
        """
        values = [
            LiveStorage(s.name, s.nbytes, s.stage, _category(s, step), s.source)
            for s in self.storages
            if s.made <= step <= s.last and stage in (None, s.stage)
        ]
        return tuple(sorted(values, key=lambda value: -value.nbytes))

    def curve(self, stage: int | None = None) -> tuple[Mapping[CategoryName, int], ...]:
        """Bytes by category at each step; of one stage, or of all."""
        return self._curves[stage]

    @cached_property
    def _curves(self) -> Mapping[int | None, tuple[Mapping[CategoryName, int], ...]]:
        curves: dict[int | None, list[Counter[CategoryName]]] = {}
        for stage in (None, *self.stages):
            of = self.stages if stage is None else (stage,)
            always = sum((Counter(self.variables[s]) for s in of), Counter[CategoryName]())
            curves[stage] = [Counter(always) for _ in self.steps]
        for storage in self.storages:
            for step in range(max(storage.made, 0), storage.last + 1):
                category = _category(storage, step)
                curves[None][step][category] += storage.nbytes
                curves[storage.stage][step][category] += storage.nbytes
        return {stage: tuple(curve) for stage, curve in curves.items()}

    def peak(self, stage: int | None = None) -> int:
        """The place of the first step with the most bytes; of one stage, or of all."""
        totals = [sum(at.values()) for at in self.curve(stage)]
        return totals.index(max(totals)) if totals else 0

    def peak_bytes(self, stage: int | None = None) -> int:
        """The bytes at the peak."""
        curve = self.curve(stage)
        return sum(curve[self.peak(stage)].values()) if curve else 0

    def counters(self) -> dict[str, list[dict[CategoryName, int]]]:
        """Bytes by category at each step, for each stage, as a trace has them: a counter each."""
        return {
            f"stage {stage}, this computer": [dict(at) for at in self.curve(stage)]
            for stage in self.stages
        }

    def __str__(self) -> str:
        """A row for each stage at its peak, and the largest values at the peak of all."""
        names = [name for name in CATEGORIES if any(name in at for at in self.curve())]
        rows = [("stage (this computer)", *names, "peak", "at")]
        for stage in self.stages:
            if not self.steps:
                continue
            at = self.curve(stage)[self.peak(stage)]
            cells = (byte_text(at.get(name, 0)) for name in names)
            place = _place(self.steps[self.peak(stage)])
            rows.append((str(stage), *cells, byte_text(self.peak_bytes(stage)), place))
        lines = columns(rows)
        if self.steps:
            step = self.peak()
            lines.append(
                f"peak of all: {byte_text(self.peak_bytes())} at {_place(self.steps[step])}"
            )
            lines += [f"  {value}" for value in self.held(step)[:8]]
        return "\n".join(lines)

    def svg(self) -> Picture:
        """A drawing: an area for each category over the steps, a band for each stage."""
        names = [name for name in CATEGORIES if any(name in at for at in self.curve())]
        most = max((self.peak_bytes(stage) for stage in self.stages), default=0) or 1
        parts, top = list[str](), float(_LINE)
        for stage in self.stages:
            title = f"stage {stage}, this computer: peak {byte_text(self.peak_bytes(stage))}"
            parts.append(text(8, top, title))
            parts += _areas(self.curve(stage), names, top + 6, most)
            top += _HEIGHT + 2 * _LINE
        for place, name in enumerate(names):
            y = top + place * _LINE
            parts += [rect(8, y - 11, 12, 12, _COLOURS[name]), text(26, y, name)]
        height = top + len(names) * _LINE
        return picture(_WIDTH + 16, height, "memory of this computer", parts)

    def _repr_svg_(self) -> str:
        return self.svg()


def _category(storage: FollowedStorage, step: int) -> CategoryName:
    if storage.is_stream:
        return CATEGORY_OF["stream"]
    if not storage.is_value:
        return "temporaries"
    return CATEGORY_OF["activation" if step <= storage.passed else "stash"]


def _place(step: FollowedStep) -> str:
    where = f"%{step.operator}" if step.operator else f"inside @{step.function}"
    line = f"  # {step.source}" if step.source else ""
    return f"micro-batch {step.micro_batch}, @{step.function}: {where}{line}"


def _areas(
    curve: Sequence[Mapping[CategoryName, int]],
    names: Sequence[CategoryName],
    top: float,
    most: int,
) -> list[str]:
    """A polygon for each category, one above the other."""
    width, below, polygons = _WIDTH / max(len(curve), 1), [0] * len(curve), []
    for name in names:
        above = [low + at.get(name, 0) for low, at in zip(below, curve, strict=True)]
        upper, lower = (
            [
                (8 + width * (i + right), top + _HEIGHT * (1 - nbytes / most))
                for i, nbytes in enumerate(edge)
                for right in (0, 1)
            ]
            for edge in (above, below)
        )
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *reversed(lower)))
        polygons.append(f'<polygon points="{points}" fill="{_COLOURS[name]}"/>')
        below = above
    return polygons

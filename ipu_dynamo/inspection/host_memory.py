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
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.ir.types import byte_text, columns
from ipu_dynamo.program.liveness.follow_program import ROLE_OF
from ipu_dynamo.program.liveness.live_tensors import CATEGORIES, CATEGORY_OF, CategoryName
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.runtime.execute.call_timeline import TaskBytes
from ipu_dynamo.runtime.execute.host_io.batching import Batching
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

    Of a step that is fused with its update it has the first two steps: the second one holds what
    the first one made of variables, too. A step is an operator, and bytes are those of the storages
    of tensors. In a function that is machine code steps are what its code allocates, marked
    `inside @forward0`.

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
        batching: Batching,
        hyperparameters: Hyperparameters,
        variables: Mapping[int, Sequence[tuple[str, int]]],
    ) -> "HostMemory":
        """Follow a program.

        Args:
            batching: of its calls.
            hyperparameters: see `follow_memory`.
            variables: kind and bytes of those of each stage, on all replicas.
        """
        steps, storages = follow_memory(host, schedule, batching, hyperparameters)
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

    def tasks(self) -> list[TaskBytes]:
        """For each task, in order, the bytes by stage and category: at its peak, and after it."""
        turns: dict[int, list[int]] = {}
        for place, step in enumerate(self.steps):
            turns.setdefault(step.turn, []).append(place)
        made = []
        for first, *_, last in ([*places, *places[-1:]] for places in turns.values()):
            step, after = self.steps[first], {s: Counter(self.variables[s]) for s in self.stages}
            for storage in self.storages:
                if storage.made <= last < storage.last:
                    after[storage.stage][_category(storage, last + 1)] += storage.nbytes
            most = {
                stage: max(self.curve(stage)[first : last + 1], key=lambda at: sum(at.values()))
                for stage in self.stages
            }
            task = step.stage, step.function, step.micro_batch, step.replica
            made.append(TaskBytes(task, most, after))
        return made

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
    if storage.category is not None:
        return storage.category
    if not storage.is_value:
        return "temporaries"
    return CATEGORY_OF["activation" if step <= storage.passed else "stash"]


def _place(step: FollowedStep) -> str:
    where = f"%{step.operator}" if step.operator else f"inside @{step.function}"
    line = f"  # {step.source}" if step.source else ""
    replica = f" of replica {step.replica}" if step.replica else ""
    return f"micro-batch {step.micro_batch}{replica}, @{step.function}: {where}{line}"


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

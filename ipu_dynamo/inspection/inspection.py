"""Show what became of a model: the same members for every way to compile one.

seen = ipu_dynamo.inspect(step)
print(seen)                  # the cut into stages, and reasons
print(seen.details)          # stash, decisions, times, graphs, passes, options
seen.program.schedule.svg()  # the schedule of each IPU
seen.program.host.plan       # how this computer runs a step
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from ipu_dynamo.errors import InputError
from ipu_dynamo.inspection.cut_table import CutTable
from ipu_dynamo.inspection.graph_entry import GraphEntry, Setting
from ipu_dynamo.inspection.host_memory import HostMemory
from ipu_dynamo.inspection.program_entry import ProgramEntry
from ipu_dynamo.inspection.remark import Remark
from ipu_dynamo.passes.manager import PassRun, summary
from ipu_dynamo.program.ir.types import byte_text, counted
from ipu_dynamo.program.liveness.live_tensors import CATEGORIES, CategoryName

NOT_COMPILED = "not compiled yet; call it, or `explain(x, *inputs)`"
_NO_PROGRAM = "nothing is compiled yet"
_MORE = "more: details, program.text, program.schedule, program.host.plan, program.host.memory"


@dataclass(frozen=True)
class Inspection:
    """Hold everything about a compiled model; `str` makes a short report of it.

    Args:
        title: of the report: `training step of Net`.
        programs: every compiled program, in the order of their compilation.
        program: the one of the last call; without a call the last that was compiled; None: no
            program is compiled yet.
        reasons: warnings of compilations, graph breaks, and parts of the model in no program.
        graphs: those that Dynamo captured; None: see `absent`.
        passes: records of the passes, in order, by the graph that they rewrote; None: see `absent`.
        settings: options in force, and who set them.
        times: how long compiling took, part by part, and where the code of functions is from.
        absent: why a member is None, by its name.
    """

    title: str
    programs: tuple[ProgramEntry, ...] = ()
    program: ProgramEntry | None = None
    reasons: tuple[Remark, ...] = ()
    graphs: tuple[GraphEntry, ...] | None = None
    passes: tuple[tuple[str, tuple[PassRun, ...]], ...] | None = None
    settings: tuple[Setting, ...] = ()
    times: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def joined(cls, title: str, parts: "Sequence[Inspection]", last: int) -> "Inspection":
        """Join the inspections of a model's compiled steps.

        Args:
            title: of the model.
            parts: one for each compiled step.
            last: the place of the one that was called last.
        """
        return cls(
            title,
            programs=tuple(entry for part in parts for entry in part.programs),
            program=parts[last].program if parts else None,
            reasons=tuple(dict.fromkeys(r for part in parts for r in part.reasons)),
            passes=tuple(of for part in parts for of in part.passes or ()) or None,
            times=", then ".join(part.times for part in parts if part.times),
            absent=parts[last].absent if parts else {},
        )

    @property
    def cut(self) -> CutTable | None:
        """The stages of `program`: IPU, layers, milliseconds, bytes, idle share."""
        return None if self.program is None else self.program.cut

    def why_absent(self, member: str) -> str:
        """Why a member is None; empty if it is not.

        Args:
            member: name of an attribute.
        """
        if getattr(self, member) is not None:
            return ""
        return self.absent.get(member) or (NOT_COMPILED if not self.programs else _NO_PROGRAM)

    def compare(self, other: "Inspection") -> str:
        """A table of the memory of this computer: each stage at its peak, here and in `other`.

        Raises:
            InputError: one of them has no memory to compare.
        """
        mine, others = (_memory_of(seen) for seen in (self, other))
        lines = [f"memory at the peak, this computer: {self.title} -> {other.title}"]
        for stage in (None, *sorted({*mine.stages, *others.stages})):
            before, after = (_at_peak(memory, stage) for memory in (mine, others))
            name = "all stages" if stage is None else f"stage {stage}"
            lines.append(f"{name}: {_change(sum(before.values()), sum(after.values()))}")
            lines += [
                f"  {category}: {_change(before.get(category, 0), after.get(category, 0))}"
                for category in CATEGORIES
                if before.get(category) or after.get(category)
            ]
        return "\n".join(lines)

    @property
    def details(self) -> str:
        """The rest as text: stash, decisions, times, graphs, passes, all options."""
        lines = []
        for entry in self.programs:
            lines += [f"program {entry.title}", *(f"  {line}" for line in entry.details())]
        if self.times:
            lines.append(f"compiled in {self.times}")
        for number, graph in enumerate(self.graphs or ()):
            first, *rest = graph.lines()
            lines += [f"graph {number}: {first}", *rest]
        lines += [f"passes of {kind}: {summary(runs)}" for kind, runs in self.passes or () if runs]
        if self.settings:
            lines += ["options:", *(f"  {setting}" for setting in self.settings)]
        return "\n".join([*lines, *(f"no {member}: {why}" for member, why in self.absent.items())])

    def __str__(self) -> str:
        lines, several = [f"{self.title}: {self._state}"], len(self.programs) > 1
        for entry in self.programs:
            if several or entry.program.kind not in self.title:
                last = " (the last call)" if several and entry is self.program else ""
                lines.append(f"program {entry.title}{last}")
            lines += [f"  {line}" for line in entry.summary()]
        if self.reasons:
            lines += ["reasons:", *(f"  {reason}" for reason in self.reasons)]
        if chosen := [f"{one.name} = {one.value!r}" for one in self.settings if one.chosen]:
            lines.append(f"options: {', '.join(chosen)}")
        if self.programs:
            lines.append(_MORE)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.title}: {self._state}>"

    def _repr_html_(self) -> str:
        parts = [f"<h3>{escape(self.title)}</h3><p>{escape(self._state)}</p>"]
        if self.program is not None:
            parts += [
                self.program.cut._repr_html_(),
                f"<h4>Schedule of the IPUs</h4>{self.program.schedule.svg()}",
                f"<details><summary>program</summary><pre>{escape(self.program.text)}</pre>"
                "</details>",
            ]
        all_of_it = escape("\n".join([str(self), self.details]))
        parts.append(f"<details><summary>all</summary><pre>{all_of_it}</pre></details>")
        return "\n".join(parts)

    @property
    def _state(self) -> str:
        if not self.programs:
            return "in no program" if self.reasons else NOT_COMPILED
        count = len(self.programs)
        if self.program is None or count > 1:
            return counted(count, "program")
        return self.program.size


def _memory_of(seen: Inspection) -> HostMemory:
    host = None if seen.program is None else seen.program.host
    if host is None or host.memory is None:
        why = NOT_COMPILED if host is None else host.absent.get("memory", "it has no schedule")
        raise InputError(f"the memory of {seen.title} is not known: {why}")
    return host.memory


def _at_peak(memory: HostMemory, stage: int | None) -> Mapping[CategoryName, int]:
    known = stage is None or stage in memory.stages
    return memory.curve(stage)[memory.peak(stage)] if known and memory.steps else {}


def _change(before: int, after: int) -> str:
    share = f"  ({(after - before) / before:+.0%})" if before and after != before else ""
    return f"{byte_text(before)} -> {byte_text(after)}{share}"

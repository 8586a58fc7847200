"""Record the decisions for a graph that Dynamo captured, for `inspect`."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import count

from torch import fx

from ipu_dynamo.capture.unplaceable import Unplaceable
from ipu_dynamo.errors import NO_LINE, source_line
from ipu_dynamo.inspection.graph_entry import BlockPlace, GraphEntry, Setting
from ipu_dynamo.inspection.program_entry import ProgramEntry
from ipu_dynamo.inspection.remark import Remark
from ipu_dynamo.passes.manager import PassRun
from ipu_dynamo.runtime.engines.engines import ENGINE
from ipu_dynamo.runtime.execute.reentrant import BoundProgram
from ipu_dynamo.torch_compile.backend_options import BackendOptions


@dataclass
class GraphRecord:
    """The decisions for a graph; `blocks` counts operators by block, stage and IPU.

    Args:
        given, options: as the user gave them, and as they were read.
        shapes: of the parameters and buffers of the module that it was captured from.
        root: the class of that module.
    """

    number: int = field(default_factory=count().__next__)
    given: object = None
    options: BackendOptions = field(default_factory=BackendOptions)
    operators: list[fx.Node] = field(default_factory=list)
    ended_by: tuple[str, str] | None = None
    unplaceable: tuple[Unplaceable, ...] = ()
    warned: list[str] = field(default_factory=list)
    engine: str = ""
    blocks: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    passes: dict[str, list[PassRun]] = field(default_factory=dict)
    programs: list[BoundProgram] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    root: str = ""

    def runs_of(self, kind: str) -> list[PassRun]:
        """Runs of passes on the captured, joint, forward, backward or inference graph."""
        return self.passes.setdefault(kind, [])

    def entry(self) -> GraphEntry:
        """The graph, to be looked at."""
        lines = (line for line in map(source_line, self.operators) if line != NO_LINE)
        return GraphEntry(
            number=self.number,
            operators=len(self.operators),
            first_line=next(lines, "no line of the model"),
            blocks=tuple(BlockPlace(*place, n) for place, n in self.blocks.items()),
            passes=tuple((kind, tuple(runs)) for kind, runs in self.passes.items()),
            programs=tuple(map(ProgramEntry.bound, self.programs)),
            last_calls=tuple(one.last_call[0] for one in self.programs),
            remarks=tuple(self._remarks()),
            shapes=self.shapes,
            root=self.root,
            settings=tuple(_settings(self.given, self.options, self.engine)),
        )

    def _remarks(self) -> Iterator[Remark]:
        for problem in self.unplaceable:
            yield Remark("not placed", str(problem).partition("\n")[0])
        if self.ended_by is not None:
            where, why = self.ended_by
            yield Remark("graph break", why, where)
        yield from (Remark("warning", text) for text in self.warned)


def _settings(given: object, read: BackendOptions, engine: str) -> Iterator[Setting]:
    """Every option with its value in force, and the origin of the value."""
    default = BackendOptions()
    for name in (f.name for f in fields(read)):
        value = getattr(read, name)
        named = isinstance(given, Mapping) and name in given
        by = "given" if named or value != getattr(default, name) else "default"
        if name == "engine" and value == "auto" and engine:
            value = engine
            by = f"environment variable {ENGINE}" if os.environ.get(ENGINE) else "found here"
        if name == "strategy" and value != read.core().strategy:
            value, by = read.core().strategy, f"{by}, made pipelined by micro_batches"
        yield Setting(name, value, by)

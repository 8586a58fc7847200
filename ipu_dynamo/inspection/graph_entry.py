"""Show one graph that Dynamo captured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

from ipu_dynamo.inspection.private.dynamo_programs import unwrapped
from ipu_dynamo.inspection.program_entry import ProgramEntry
from ipu_dynamo.inspection.remark import Remark
from ipu_dynamo.passes.manager import PassRun
from ipu_dynamo.program.ir.types import counted

_ENTRY = "ipu_graph"  # attribute of a backend's result


def looked_at(run: Callable[..., Any], entry: "Callable[[], GraphEntry]") -> Callable[..., Any]:
    """Attach `entry` to the result of a backend; `entry_of` finds it there, and calls it."""
    if isinstance(run, MethodType):  # which has no attributes of its own
        run = partial(run)
    setattr(unwrapped(run), _ENTRY, entry)  # what PyTorch has put around it is replaced
    return run


def entry_of(run: object) -> "GraphEntry | None":
    """The graph of a backend's result; None: it is of another backend."""
    entry = getattr(run, _ENTRY, None)
    return None if entry is None else entry()


@dataclass(frozen=True, slots=True)
class Setting:
    """An option in force, and who set it."""

    name: str
    value: object
    by: str

    @property
    def chosen(self) -> bool:
        """Whether it differs from the default by somebody's choice."""
        return not self.by.startswith(("default", "found here"))

    def __str__(self) -> str:
        return f"{self.name} = {self.value!r}  ({self.by})"


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block went; `operators` are those of the captured graph in it."""

    block: str
    stage: int
    ipu: int
    operators: int

    def __str__(self) -> str:
        operators = counted(self.operators, "operator")
        return f"{self.block} -> stage {self.stage} -> ipu{self.ipu}  ({operators})"


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """One graph that Dynamo captured.

    Args:
        number: grows with each graph that is compiled.
        operators: how many calls it holds.
        first_line: where its first operator is in the model.
        blocks: in the order of the model.
        passes: records of the passes, in order, on the `captured` graph and on those that
            AOTAutograd made of it: `forward` and `backward`, or `inference`.
        programs: the compiled programs, in the order in which they run.
        last_calls: of each program; larger is later, 0 is never.
        remarks: a break at its end, what cannot be placed, and warnings.
        shapes: of the module's parameters and buffers that it reads, by name.
        root: the class of the module that it was captured from; empty: not known.
        settings: options in force.
    """

    number: int
    operators: int
    first_line: str
    blocks: tuple[BlockPlace, ...]
    passes: tuple[tuple[str, tuple[PassRun, ...]], ...]
    programs: tuple[ProgramEntry, ...]
    last_calls: tuple[int, ...] = ()
    remarks: tuple[Remark, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    root: str = ""
    settings: tuple[Setting, ...] = ()

    def lines(self) -> list[str]:
        """A line on its operators, and one on the place of each block."""
        head = f"{counted(self.operators, 'operator')} from {self.first_line}"
        return [head, *(f"  block {place}" for place in self.blocks)]

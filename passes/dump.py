"""Write the model after each pass: to a folder for each graph, and to PyTorch's structured trace.

A folder has the model after each pass as a file. `passes.txt` has the passes with their options,
and `operators.txt` which operators came and went in each. `python -m ipu_dynamo.opt` reads the
files of the levels that `level_text.py` reads back.

A trace has the model before the first pass as the artifact `ipu_<graph>_00_<name>`. Each pass that
changed the model adds an artifact `ipu_<graph>_<number>_<pass>` of JSON: level, operators that came
and went, and the difference of the texts.
"""

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from pathlib import Path

from ipu_dynamo.ops.private.structured_trace import is_tracing, write_artifact
from ipu_dynamo.passes.contents import graphs_of, operators_of
from ipu_dynamo.passes.host.recipes.figures import figures_of
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Model
from ipu_dynamo.program import HostProgram
from ipu_dynamo.program.text.operator_text import operator_label
from ipu_dynamo.rank_number import ranks, this_rank

DUMP = "IPU_DYNAMO_DUMP"  # environment variable: a folder for the model after each pass
PASSES, OPERATORS = "passes.txt", "operators.txt"


@dataclass
class Dump:
    """Write one graph after each pass, if the environment asks for files or a trace.

    Invariant: a file is never written over, by this process or another one.

    Args:
        graph: its name, for the trace.
        folder: for files; None: none are written.
        traced: whether artifacts are written.
        count: how many models were written.
        text, operators: of the last model.
    """

    graph: str
    folder: Path | None
    traced: bool
    count: int = 0
    text: str = ""
    operators: Counter[str] = field(default_factory=Counter)

    @classmethod
    def begin(cls, name: str) -> "Dump":
        """A folder for a graph inside the one that `IPU_DYNAMO_DUMP` names: `000_training`.

        Each of several ranks has a folder of its own there: `rank3/000_training`.
        """
        root = os.environ.get(DUMP)
        if root and ranks() > 1:
            root = os.path.join(root, f"rank{this_rank()}")
        return cls(name, _new_folder(Path(root), name) if root else None, is_tracing())

    def write(
        self, name: str, model: Model, step: Pass | None = None, *, changed: bool = True
    ) -> None:
        """Write `model`, which `step` has left.

        Args:
            changed: whether the pass changed it.
        """
        if self.folder is None and not self.traced:
            return  # to make a text takes as long as a pass
        if changed or self.folder is not None:
            self._write(f"{self.count:02}_{name}", model, step, changed)
        self.count += 1

    def _write(self, numbered: str, model: Model, step: Pass | None, changed: bool) -> None:
        from ipu_dynamo.passes.level_text import pass_text, write_level  # others do not pay for it

        text = write_level(model)
        operators = Counter(map(operator_label, operators_of(graphs_of(model))))
        came, went = operators - self.operators, self.operators - operators
        if self.folder is not None:
            (self.folder / f"{numbered}.txt").write_text(text)
            if step is not None:
                _append(self.folder / PASSES, pass_text(_measured(step, model)))
                if came or went:
                    _append(self.folder / OPERATORS, f"{numbered}{_signed(came, went)}")
        if self.traced and step is None:
            write_artifact(f"ipu_{self.graph}_{numbered}", "string", lambda: text)
        elif self.traced and step is not None and changed:
            before, after = self.text.splitlines(), text.splitlines()
            record = {
                "pass": step.name,
                "level": step.level,
                "came": dict(sorted(came.items())),
                "went": dict(sorted(went.items())),
                "diff": [*unified_diff(before, after, "before", "after", lineterm="")],
            }
            write_artifact(f"ipu_{self.graph}_{numbered}", "json", lambda: record)
        self.text, self.operators = text, operators


def _signed(came: Counter[str], went: Counter[str]) -> str:
    """`  + 2 aten.mm, 1 aten.t  - 1 aten.linear`."""
    parts = []
    for sign, counts in (("+", came), ("-", went)):
        if counts:
            listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            parts.append(f"  {sign} {listed}")
    return "".join(parts)


def _append(file: Path, line: str) -> None:
    with file.open("a") as lines:
        lines.write(f"{line}\n")


def _measured(step: Pass, model: Model) -> Pass:
    """A host pass with the figures by which it has decided, if it measured them."""
    if not isinstance(model, HostProgram) or getattr(step, "figures", model) is not None:
        return step
    compiled = [r.function for r in model.recipes.values() if r.engine == "inductor"]
    if not compiled:
        return step
    return replace(step, figures=figures_of(compiled))  # type: ignore[type-var]


def _new_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = len(list(root.iterdir()))
    while True:
        if not any(root.glob(f"{number:03}_*")):
            folder = root / f"{number:03}_{name}"
            try:
                folder.mkdir()
            except FileExistsError:  # another process was faster
                continue
            return folder
        number += 1

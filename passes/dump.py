"""Write the model after each pass to a file, in a folder for each graph.

`passes.txt` has the passes with their options. `python -m ipu_dynamo.opt` reads the files of the
levels that `level_text.py` reads back.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.passes.host.recipes.figures import figures_of
from ipu_dynamo.passes.levels import BatchPieces, Directions, Model, Partitioned, Pass, SplitCapture
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdateGraphs
from ipu_dynamo.program import Function, HostProgram

DUMP = "IPU_DYNAMO_DUMP"  # environment variable: a folder for the model after each pass
PASSES = "passes.txt"


def operators_in(model: Model) -> int:
    """How many operators a model has; a function of a program counts once."""
    if isinstance(model, Capture):
        return _count(model.graph)
    if isinstance(model, Directions):
        return _count(model.forward) + _count(model.backward)
    if isinstance(model, Partitioned):
        return sum(_count(part.graph) for part in model.parts)
    if isinstance(model, SplitCapture):
        return _count(model.capture.graph)
    if isinstance(model, BatchPieces):
        return sum(_count(piece.capture.graph) for piece in model.pieces)
    if isinstance(model, RecordedUpdate | UpdateGraphs):
        return sum(_count(step.graph) for step in model.steps)
    if isinstance(model, Function):
        return len(model.operators)
    if isinstance(model, UpdateFunctions):
        functions = [f for step in model.steps for f in (step.factors, *step.pieces.values())]
        return sum(len(function.operators) for function in functions)
    if isinstance(model, HostProgram):
        model = model.inlined
    return sum(len(function.operators) for function in model.functions)


@dataclass
class Dump:
    """A new folder for one graph; nothing is written unless the environment names one.

    Invariant: a file is never written over, by this process or another one.
    """

    folder: Path | None
    count: int = 0

    @classmethod
    def begin(cls, name: str) -> "Dump":
        """A folder for a graph inside the one that `IPU_DYNAMO_DUMP` names: `000_training`."""
        root = os.environ.get(DUMP)
        return cls(_new_folder(Path(root), name) if root else None)

    def write(self, name: str, model: Model, step: Pass | None = None) -> None:
        """Write `model`, which `step` has left."""
        if self.folder is None:  # only else is it made a text: that takes as long as a pass
            return
        from ipu_dynamo.passes.level_text import pass_text, write_level  # others do not pay for it

        (self.folder / f"{self.count:02}_{name}.txt").write_text(write_level(model))
        self.count += 1
        if step is not None:
            with (self.folder / PASSES).open("a") as passes:
                passes.write(f"{pass_text(_measured(step, model))}\n")


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


def _count(graph: fx.GraphModule) -> int:
    return sum(node.op not in ("placeholder", "output") for node in graph.graph.nodes)

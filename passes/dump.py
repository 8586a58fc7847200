"""Write what each pass leaves to a folder: one for each graph, one file for each pass."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Capture
from ipu_dynamo.errors import source_line
from ipu_dynamo.passes.levels import Directions, Model, Partitioned
from ipu_dynamo.program import HostProgram
from ipu_dynamo.program.text.operator_text import operator_text, value_text

DUMP = "IPU_DYNAMO_DUMP"  # environment variable: a folder for the model after each pass
_COLUMN = 96  # where notes begin


def text_of(model: Model) -> str:
    """A model as text: operators with types, stages and the user's lines."""
    if isinstance(model, Capture):
        return "\n".join(_capture_lines(model))
    if isinstance(model, Directions):
        return "\n".join(_directions_lines(model))
    if isinstance(model, Partitioned):
        return "\n".join(_parts_lines(model))
    if isinstance(model, HostProgram):
        model = model.inlined
    functions = [f"{function}\n{function.listing()}" for function in model.functions]
    return "\n".join([str(model), *functions])


def operators_in(model: Model) -> int:
    """How many operators a model has; a function of a program counts once."""
    if isinstance(model, Capture):
        return _count(model.graph)
    if isinstance(model, Directions):
        return _count(model.forward) + _count(model.backward)
    if isinstance(model, Partitioned):
        return sum(_count(part.graph) for part in model.parts)
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

    def write(self, name: str, model: Model) -> None:
        if self.folder is not None:  # only then is it made a text: that takes as long as a pass
            text = text_of(model)
            (self.folder / f"{self.count:02}_{name}.txt").write_text(f"{text}\n")
            self.count += 1


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


def _capture_lines(capture: Capture) -> Iterator[str]:
    for node, role in capture.roles().items():
        yield f"{f'{role.kind} {value_text(node)}':<{_COLUMN}}  # {role.name}"
    for node in capture.graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            yield _line(node)
    for returned, result in zip(capture.returned, capture.outputs, strict=True):
        name = f"%{returned.name}" if isinstance(returned, fx.Node) else str(returned)
        yield f"return {result.kind} {result.name} = {name}"


def _directions_lines(directions: Directions) -> Iterator[str]:
    for name, graph in (("forward", directions.forward), ("backward", directions.backward)):
        taken = ", ".join(node.name for node in graph.graph.find_nodes(op="placeholder"))
        returned = ", ".join(node.name for node in graph.graph.output_node().all_input_nodes)
        yield f"{name}: ({taken}) -> ({returned})"
        for node in graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                yield f"  {_line(node)}"


def _parts_lines(partitioned: Partitioned) -> Iterator[str]:
    for part in partitioned.parts:
        takes = f"{part.function_name} on ipu{part.ipu}, {part.direction} of stage {part.stage}"
        yield f"{takes}: ({', '.join(part.inputs)}) -> ({', '.join(part.outputs)})"
        for node in part.graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                yield f"  {_line(node)}"


def _line(node: fx.Node) -> str:
    direction = {None: "", True: "backward", False: "forward"}[node.meta.get(BACKWARD)]
    stage = f"stage {node.meta[STAGE]}" if STAGE in node.meta else ""
    line = source_line(node) if node.meta.get("stack_trace") else ""
    notes = ", ".join(filter(None, (f"{stage} {direction}".strip(), line)))
    return f"{operator_text(node):<{_COLUMN}}  # {notes}" if notes else operator_text(node)

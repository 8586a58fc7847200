"""Write what each pass leaves to a folder: one for each graph, one file for each pass."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Capture
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.capture.update.trace_step import RecordedStep
from ipu_dynamo.errors import source_line
from ipu_dynamo.passes.levels import (
    JOINT,
    BatchPieces,
    Directions,
    Model,
    Partitioned,
    SplitCapture,
    UpdateFunctions,
    UpdateGraphs,
    UpdatePlan,
    UpdateStep,
)
from ipu_dynamo.passes.micro_batch.placements import Kind, Piece
from ipu_dynamo.program import Function, HostProgram, graph_outputs
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
    if isinstance(model, SplitCapture):
        return "\n".join(_split_lines(model))
    if isinstance(model, BatchPieces):
        return "\n".join(line for piece in model.pieces for line in _piece_lines(piece))
    if isinstance(model, RecordedUpdate | UpdateGraphs):
        return "\n".join(_update_lines(model))
    if isinstance(model, Function):
        return f"{model}\n{model.listing()}"
    if isinstance(model, UpdateFunctions):
        return "\n".join(_functions_lines(model))
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


def _split_lines(model: SplitCapture) -> Iterator[str]:
    yield f"{model.split.n} micro-batches"
    for node, placements in model.split.at.items():
        placed = placements if isinstance(placements, tuple) else (placements,)
        names = ", ".join(at.name if isinstance(at, Kind) else str(at) for at in placed)
        text = value_text(node) if node.op == "placeholder" else operator_text(node)
        yield f"{text:<{_COLUMN}}  # {names}"


def _piece_lines(piece: Piece) -> Iterator[str]:
    yield f"{piece.phase}: ({', '.join(piece.sources.values())}) -> ({', '.join(piece.results)})"
    yield from (f"  {line}" for line in _capture_lines(piece.capture))


def _parts_lines(partitioned: Partitioned) -> Iterator[str]:
    for part in partitioned.parts:
        takes = f"{part.function_name} on ipu{part.ipu}, {part.direction} of stage {part.stage}"
        yield f"{takes}: ({', '.join(part.inputs)}) -> ({', '.join(part.outputs)})"
        for node in part.graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                yield f"  {_line(node)}"


def _update_lines(update: RecordedUpdate | UpdateGraphs) -> Iterator[str]:
    steps: Sequence[RecordedStep | UpdateStep] = update.steps
    for number, step in enumerate(steps):
        recorded = step.recorded if isinstance(step, UpdateStep) else step
        names = recorded.world.names
        yield f"step {number} of {len(steps)}"
        roles = [*names, *(f"gradient of {name}" for name in names)]
        roles += [leaf.path for leaf in recorded.taken]
        for node, role in zip(step.graph.graph.find_nodes(op="placeholder"), roles, strict=True):
            yield f"{f'  input {value_text(node)}':<{_COLUMN}}  # {role}"
        for node in step.graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                text = f"  {operator_text(node)}"
                owner = _owner_text(step, node) if isinstance(step, UpdateStep) else ""
                yield f"{text:<{_COLUMN}}  # {owner}" if owner else text
        nodes = iter(graph_outputs(step.graph))
        for result in recorded.results:
            value = f"%{next(nodes).name}" if result.in_graph else repr(result.constant)
            yield f"  return {result.path} = {value}"
        if isinstance(step, UpdateStep):
            yield from (f"  holds if %{node.name}  # {line}" for node, line in step.conditions)
        else:
            yield from (
                f"  holds if {expression}  # {line}" for expression, line in step.conditions
            )
    if isinstance(update, UpdateGraphs) and update.plan is not None:
        yield from _plan_lines(update.plan, update.steps[-1].world.names)


def _owner_text(step: UpdateStep, node: fx.Node) -> str:
    if node not in step.places:
        return ""
    place = step.places[node]
    owner = "joint" if place.owner == JOINT else step.world.names[place.owner]
    return f"{owner}, round {place.round}"


def _plan_lines(plan: UpdatePlan, names: Sequence[str]) -> Iterator[str]:
    for path, counter in plan.counters.items():
        yield f"counter {counter.name}: {counter.type} = {counter.initial}  # {path}"
    for path in plan.hyperparameters:
        yield f"hyperparameter {path}"
    for name, states in zip(names, plan.states, strict=True):
        yield from (f"state {s.key} of {name}: {s.type}  # {s.path}" for s in states)
    for state in plan.shared:
        yield f"state {state.key}: {state.type}  # {state.path}"


def _functions_lines(update: UpdateFunctions) -> Iterator[str]:
    for number, step in enumerate(update.steps):
        yield f"step {number} of {len(update.steps)}"
        yield f"  ({', '.join(step.results)}) = {step.factors.name}"
        for turn in step.rounds:
            for name, part in turn.parts.items():
                yield f"  ({', '.join(part.results)}) = {part.function} of {name}"
            yield f"  ({', '.join(turn.results)}) = {turn.function}({', '.join(turn.arguments)})"
        for name, piece in step.functions.items():
            yield f"  update {name} by {piece}({', '.join(step.arguments[name])})"
        for function in (step.factors, *step.pieces.values()):
            yield f"{function}\n{function.listing()}"
    yield from _plan_lines(update.plan, update.traced.names)


def _line(node: fx.Node) -> str:
    direction = {None: "", True: "backward", False: "forward"}[node.meta.get(BACKWARD)]
    stage = f"stage {node.meta[STAGE]}" if STAGE in node.meta else ""
    line = source_line(node) if node.meta.get("stack_trace") else ""
    notes = ", ".join(filter(None, (f"{stage} {direction}".strip(), line)))
    return f"{operator_text(node):<{_COLUMN}}  # {notes}" if notes else operator_text(node)

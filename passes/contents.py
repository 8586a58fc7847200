"""Scan the content of a model once, so that passes without work are not entered."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.passes.levels import BatchPieces, Directions, Model, Partitioned, SplitCapture
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdateGraphs
from ipu_dynamo.program import Function, HostProgram
from ipu_dynamo.program.recipe import FunctionRecipe

HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Contents:
    """The content of a model's graphs, including their inner graphs.

    Args:
        operators: their number, without those of inner graphs.
        targets: of all nodes.
        marks: keys of the nodes' `meta`.
        dtypes: of the nodes' tensors.
        attributes: whether a node reads a tensor or module that its graph holds.
        bodies: whether loops or branches run graphs.
    """

    operators: int
    targets: frozenset[object]
    marks: frozenset[str]
    dtypes: frozenset[torch.dtype]
    attributes: bool
    bodies: bool

    @classmethod
    def of(cls, model: Model) -> "Contents":
        """Scan the graphs of a model."""
        graphs = graphs_of(model)
        operators = sum(1 for _ in operators_of(graphs))
        targets, marks, dtypes = set[object](), set[str](), set[torch.dtype]()
        pending = [*graphs, *_further_graphs(model)]
        seen, attributes, bodies = set[fx.GraphModule](), False, False
        while pending:
            module = pending.pop()
            if module in seen:
                continue
            seen.add(module)
            pending += [m for m in module.modules() if isinstance(m, fx.GraphModule)]
            for node in module.graph.nodes:
                targets.add(node.target)
                attributes |= node.op == "get_attr"
                marks.update(node.meta)
                value = node.meta.get("val")
                if isinstance(value, Tensor):
                    dtypes.add(value.dtype)
                for body in bodies_of(node):
                    bodies = True
                    pending.append(body.graph)
        sets = frozenset(targets), frozenset(marks), frozenset(dtypes)
        return cls(operators, *sets, attributes, bodies)

    @property
    def halves(self) -> bool:
        """Whether a tensor has a half-precision type."""
        return not self.dtypes.isdisjoint(HALVES)


def operators_of(graphs: list[fx.GraphModule]) -> Iterator[fx.Node]:
    """The operators of graphs."""
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                yield node


def graphs_of(model: Model) -> list[fx.GraphModule]:
    """The graphs of a model; a function of a program counts once."""
    if isinstance(model, Capture):
        return [model.graph]
    if isinstance(model, Directions):
        return [model.forward, model.backward]
    if isinstance(model, Partitioned):
        return [part.graph for part in model.parts]
    if isinstance(model, SplitCapture):
        return [model.capture.graph]
    if isinstance(model, BatchPieces):
        return [piece.capture.graph for piece in model.pieces]
    if isinstance(model, RecordedUpdate | UpdateGraphs):
        return [step.graph for step in model.steps]
    if isinstance(model, Function):
        return [model.graph]
    if isinstance(model, UpdateFunctions):
        functions = [f for step in model.steps for f in (step.factors, *step.pieces.values())]
        return [function.graph for function in functions]
    if isinstance(model, HostProgram):
        return [function.graph for function in _run_here(model)]
    return [function.graph for function in model.functions]


def _run_here(host: HostProgram) -> Iterator[Function]:
    """The functions that this computer runs, with its own operators once a pass has chosen them."""
    functions = host.runs.functions if host.fused is None else (host.fused.function,)
    for function in functions:
        recipe = host.recipes.get(function.name)
        yield function if recipe is None else recipe.lowered


def _further_graphs(model: Model) -> Iterator[fx.GraphModule]:
    """The graphs that only some passes read: before recipes, and the bodies in these."""
    if isinstance(model, HostProgram):
        yield from (function.graph for function in model.inlined.functions)
        for recipe in model.recipes.values():
            yield from _bodies_in(recipe)


def _bodies_in(recipe: FunctionRecipe) -> Iterator[fx.GraphModule]:
    for body in recipe.bodies:
        yield body.lowered.graph
        yield from _bodies_in(body)

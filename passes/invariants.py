"""List the invariants of each level, and the passes that establish them.

An invariant of a level holds from the pass on that establishes it, until the level is left.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Capture, Traced
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.ops.graph_queries import draws, writes
from ipu_dynamo.ops.marks.convolution_groups import begin_convolutions, end_convolutions
from ipu_dynamo.ops.marks.markers import (
    begin_block,
    end_block,
    gradient_op,
    recomputation_checkpoint_op,
)
from ipu_dynamo.ops.marks.overlap import overlap_input_op, overlap_output_op
from ipu_dynamo.passes.levels import Level, Partitioned
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdateGraphs
from ipu_dynamo.program import Program, graph_outputs
from ipu_dynamo.program.ir.verify.program import verify

Problems = Iterator[str]


@dataclass(frozen=True)
class Invariant:
    """A claim that holds at a level.

    Args:
        since: the passes that establish it; empty: it holds from the beginning.
        broken: returns the violations, one line each.
    """

    claim: str
    levels: tuple[Level, ...]
    since: tuple[str, ...]
    broken: Callable[[Any], Problems]


def check(model: object, level: Level, done: Collection[str]) -> None:
    """Assert the invariants of `model` after the passes named in `done`."""
    for one in INVARIANTS:
        if level in one.levels and (not one.since or not set(one.since).isdisjoint(done)):
            for problem in one.broken(model):
                raise AssertionError(f"not {one.claim}: {problem}")


def _described(capture: Capture) -> Problems:
    capture.graph.graph.lint()
    if len(capture.placeholder_nodes) != len(capture.placeholders):
        yield "a placeholder without a role"
    if len(capture.returned) != len(capture.outputs):
        yield "an output without a role"
    held = {p.name for p in capture.placeholders if p.kind in ("parameter", "buffer", "constant")}
    for name in held - capture.report.tensors.keys():
        yield f"no tensor for {name}"


def _valued(capture: Capture) -> Problems:
    for node in capture.graph.graph.nodes:
        if node.op != "output" and "val" not in node.meta:
            yield f"%{node.name} has no value"


def _without(*targets: object) -> Callable[[Capture], Problems]:
    def broken(capture: Capture) -> Problems:
        for node in capture.graph.graph.nodes:
            if node.target in targets:
                yield f"%{node.name} = {node.target}"

    return broken


def _knows_loss(capture: Traced) -> Problems:
    if capture.training and capture.loss is None:
        yield "the model has none"


def _functional(capture: Capture) -> Problems:
    for node in capture.graph.graph.nodes:
        if writes(node):
            yield f"%{node.name} = {node.target} writes an argument"


def _one_graph(capture: Capture) -> Problems:
    for node in capture.graph.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            yield f"%{node.name} is {node.op}"


def _static(capture: Capture) -> Problems:
    for node in capture.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(type(size) is not int for size in value.shape):
            yield f"%{node.name} has the shape {tuple(value.shape)}"


def _directed(capture: Capture) -> Problems:
    for node in _operators(capture):
        if BACKWARD not in node.meta:
            yield f"%{node.name} has no direction"


def _staged(capture: Capture) -> Problems:
    for node in _operators(capture):
        if node.meta.get(STAGE) not in capture.ipus:
            yield f"%{node.name} has stage {node.meta.get(STAGE)}"


def _begun(capture: Capture) -> Problems:
    for role in capture.placeholders:
        if role.kind == "tangent":
            yield "the gradient of the loss is an input"


def _counted(capture: Capture) -> Problems:
    for node in _operators(capture):
        if draws(node):
            yield f"%{node.name} = {node.target} draws from a generator"


def _ordered(partitioned: Partitioned) -> Problems:
    """Each value is made before it is read."""
    made = {name for part in partitioned.parts for name in part.outputs}
    before: set[str] = set()
    for part in partitioned.parts:
        for name in part.inputs:
            if name in made and name not in before:
                yield f"{part.function_name} reads {name} before it is made"
        before.update(part.outputs)
    for name in (*partitioned.returned, *partitioned.changed.values()):
        if name not in made:
            yield f"nothing makes {name}, which is returned"


def _complete(partitioned: Partitioned) -> Problems:
    """Each part's graph is valid, and has the inputs and outputs that it says."""
    for part in partitioned.parts:
        part.graph.graph.lint()
        if len(list(part.graph.graph.find_nodes(op="placeholder"))) != len(part.inputs):
            yield f"an input of {part.function_name} without a name"
        if len(graph_outputs(part.graph)) != len(part.outputs):
            yield f"a result of {part.function_name} without a name"
        for node in part.graph.graph.nodes:
            if "val" not in node.meta:
                yield f"%{node.name} in {part.function_name} has no value"


def _pure(update: RecordedUpdate | UpdateGraphs) -> Problems:
    for step in update.steps:
        for node in step.graph.graph.nodes:
            if writes(node):
                yield f"%{node.name} = {node.target} writes an argument"


def _of_tensors(update: UpdateGraphs) -> Problems:
    """Each step is a valid graph of tensors, and has the inputs and outputs that it says."""
    for step in update.steps:
        step.graph.graph.lint()
        inputs = 2 * len(step.parameters) + len(step.recorded.taken)
        if len(list(step.graph.graph.find_nodes(op="placeholder"))) != inputs:
            yield "an input without a role"
        results = [result for result in step.recorded.results if result.in_graph]
        if len(graph_outputs(step.graph)) != len(results) + len(step.recorded.kept_conditions):
            yield "a result without a role"
        for node in step.graph.graph.nodes:
            if node.op != "output" and not isinstance(node.meta.get("val"), _VALUES):
                yield f"%{node.name} is no tensor"


_VALUES = (torch.Tensor, list, tuple)  # of tensors


def _without_tensors(update: UpdateGraphs) -> Problems:
    for step in update.steps:
        for node in step.graph.graph.find_nodes(op="get_attr"):
            yield f"%{node.name} is a tensor of the graph"


def _planned(update: UpdateGraphs) -> Problems:
    if update.plan is None:
        yield "the update has no plan"
    elif len(update.plan.states) != len(update.steps[-1].parameters):
        yield "a parameter without a plan"


def _owned(update: UpdateGraphs) -> Problems:
    for step in update.steps:
        for node in (*step.parameters, *step.gradients, *step.weights):
            if node not in step.places:
                yield f"%{node.name} has no owner"


def _callable(update: UpdateFunctions) -> Problems:
    """Every function that a step names is there, and has a parameter's own arguments."""
    for step in update.steps:
        named = {*step.functions.values(), *(r.function for r in step.rounds)}
        named |= {part.function for r in step.rounds for part in r.parts.values()}
        for name in named - step.pieces.keys():
            yield f"there is no function {name}"
        if step.functions.keys() != set(update.traced.names):
            yield "a parameter without a function"


def _operators(capture: Capture) -> Iterator[fx.Node]:
    return (n for n in capture.graph.graph.nodes if n.op not in ("placeholder", "output"))


def _verified(program: Program) -> Problems:
    verify(program)
    yield from ()


_CAPTURES: tuple[Level, ...] = ("traced", "joint")
INVARIANTS = (
    Invariant("described", _CAPTURES, (), _described),
    Invariant("all values known", ("joint",), ("Differentiate", "LiftJointConstants"), _valued),
    Invariant("without block markers", _CAPTURES, ("Placement",), _without(begin_block, end_block)),
    Invariant(
        "without markers of overlap",
        _CAPTURES,
        ("OverlapIO",),
        _without(overlap_input_op, overlap_output_op),
    ),
    Invariant(
        "without markers of convolutions",
        _CAPTURES,
        ("TagConvolutionGroups",),
        _without(begin_convolutions, end_convolutions),
    ),
    Invariant("the loss known", ("traced",), ("IdentityLoss",), _knows_loss),
    Invariant("functional", ("joint",), ("Differentiate", "CallChecks"), _functional),
    Invariant(
        "without marks of gradients", ("joint",), ("AnchorGradients",), _without(gradient_op)
    ),
    Invariant("of static shapes", ("joint",), ("FixSizes",), _static),
    Invariant("one graph of operators", ("joint",), ("LiftJointConstants",), _one_graph),
    Invariant("every direction known", ("joint",), ("Differentiate", "ReadStages"), _directed),
    Invariant("the gradient of the loss known", ("joint",), ("StartBackward",), _begun),
    Invariant("every stage known", ("joint",), ("AssignGradientStages",), _staged),
    Invariant("random by counters", ("joint",), ("CounterRandom",), _counted),
    Invariant(
        "without marks for recomputation",
        ("joint",),
        ("Recompute",),
        _without(recomputation_checkpoint_op),
    ),
    Invariant("complete parts", ("parts",), (), _complete),
    Invariant("in the order of the data", ("parts",), (), _ordered),
    Invariant("a program that can run as it reads", ("program",), (), _verified),
    Invariant("without writes", ("recorded", "update"), ("RemoveWrites",), _pure),
    Invariant("graphs of tensors", ("update",), ("TensorifyScalars",), _of_tensors),
    Invariant("without tensors of its own", ("update",), ("FillConstants",), _without_tensors),
    Invariant("planned", ("update",), ("PlanUpdate",), _planned),
    Invariant("all owners known", ("update",), ("AssignOwners",), _owned),
    Invariant("complete functions", ("functions",), (), _callable),
)
ESTABLISHING = frozenset(name for one in INVARIANTS for name in one.since)

"""Follow stages through a graph: from its inputs by every call to its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ipu_dynamo.keras.stages.assignments import NestedAssignment
from ipu_dynamo.keras.stages.layer_graph import Call, LayerGraph, layer_graph


@dataclass(frozen=True, slots=True)
class StagedCall:
    """A call with the stage that it runs on.

    Of a nested model `inner` is its own graph, and `stage` the latest stage inside.
    """

    call: Call
    stage: int
    inner: "StagedGraph | None" = None


@dataclass(frozen=True, slots=True)
class StagedGraph:
    """A graph with stages for its calls, in post order, and for its flat outputs."""

    graph: LayerGraph
    calls: tuple[StagedCall, ...]
    output_stages: tuple[int, ...]


def flow(
    graph: LayerGraph,
    assignment: Sequence[Any],
    input_stages: Sequence[int] | None = None,
    *,
    training: bool = False,
) -> StagedGraph:
    """Give every call its stage: a layer that of its element, an operation that of its inputs.

    Args:
        graph: the graph.
        assignment: elements for its layers, which fit it and have stages.
        input_stages: by flat input, on which stage it is; 0 if left out.
        training: nested Model subclasses run as traced for training.

    Raises:
        ValueError: an input of a layer comes from a later stage.
    """
    if graph.inputs is None:
        return _chain(graph, assignment, max(input_stages or [0]))
    flat = keras.tree.flatten(graph.inputs)
    if input_stages is None or len(input_stages) != len(flat):
        input_stages = [max(input_stages or [0])] * len(flat)
    stages = {id(tensor): stage for tensor, stage in zip(flat, input_stages, strict=True)}
    elements = iter(assignment)
    calls = []
    for call in graph.calls:
        before = [stages[id(tensor)] for tensor in call.node.input_tensors]
        element = next(elements) if call.is_layer else None
        staged, after = _staged(call, element, before, training)
        calls.append(staged)
        after = after if len(after) == len(call.node.outputs) else [max(after)]
        for position, tensor in enumerate(call.node.outputs):
            stages[id(tensor)] = after[position] if len(after) > 1 else after[0]
    outputs = keras.tree.flatten(graph.outputs)
    return StagedGraph(graph, tuple(calls), tuple(stages[id(tensor)] for tensor in outputs))


def _staged(
    call: Call, element: Any, before: Sequence[int], training: bool
) -> tuple[StagedCall, Sequence[int]]:
    """A call with its stage, and the stages of its outputs."""
    latest = max(before, default=0)
    if element is None:
        return StagedCall(call, latest), [latest]
    if isinstance(element, NestedAssignment):
        inner = flow(
            layer_graph(call.operation, training=training),
            element.pipeline_stage_assignments,
            before,
            training=training,
        )
        last = max((staged.stage for staged in inner.calls), default=latest)
        return StagedCall(call, last, inner), inner.output_stages
    stage = element.pipeline_stage
    if latest > stage:
        raise ValueError(
            f"layer {call.operation.name} (node index {call.index}) on pipeline stage {stage} has "
            "a dependency from a pipeline stage which has not yet been executed: an input comes "
            f"from stage {latest}; assign the layer to stage {latest} or a later one"
        )
    return StagedCall(call, stage), [stage]


def _chain(graph: LayerGraph, assignment: Sequence[Any], stage: int) -> StagedGraph:
    """The stages of a Sequential that Keras makes no graph of."""
    calls = []
    for call, element in zip(graph.calls, assignment, strict=True):
        staged, after = _staged(call, element, [stage], False)
        calls.append(staged)
        stage = max(after)
    return StagedGraph(graph, tuple(calls), (stage,))

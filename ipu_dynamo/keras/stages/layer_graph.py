"""Read which calls a model's graph consists of, in the order in which they run.

Keras runs nodes by decreasing depth, and within a depth in stored order; input nodes are no calls.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ipu_dynamo.keras.private.keras_graphs import (
    function_nodes,
    function_structures,
    inbound_nodes,
    inner_functional,
    producing_node,
)
from ipu_dynamo.keras.private.keras_private import (
    Functional,
    Model,
    Sequential,
)
from ipu_dynamo.keras.stages.assignments import (
    Element,
    ModelLayerPipelineStageAssignment,
    NestedModelPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.trace_model import TRACED, trace_of


@dataclass(frozen=True, slots=True)
class Call:
    """One call in a model's graph: of a layer, of a model, or of an operation that is no layer.

    `node` is None in a Sequential that has no graph (yet); `index` is the node index for users.
    """

    operation: Any
    node: Any
    index: int

    @property
    def is_layer(self) -> bool:
        return isinstance(self.operation, keras.Layer)

    @property
    def is_model(self) -> bool:
        return isinstance(self.operation, Model)


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The calls of a model in post order; `inputs` and `outputs` are nested symbolic tensors."""

    model: Any
    inputs: Any
    outputs: Any
    calls: tuple[Call, ...]

    @property
    def layer_calls(self) -> tuple[Call, ...]:
        """Those that have an element in an assignment."""
        return tuple(call for call in self.calls if call.is_layer)


def layer_graph(model: Any, *, training: bool = False) -> LayerGraph:
    """The graph of a model; that of a Model subclass comes from its trace.

    Raises:
        RuntimeError: a Model subclass that has not been built.
    """
    if isinstance(model, Sequential):
        return _sequential_graph(model)
    if isinstance(model, Functional):
        nodes = function_nodes(model)
        inner = tuple(Call(node.operation, node, _index_in_history(node)) for node in nodes)
        return LayerGraph(model, *function_structures(model), inner)
    trace = trace_of(model)
    if training and trace.training is not None:
        trace = trace.training
    calls = tuple(
        Call(node.operation, node, index)
        for node, index in zip(trace.nodes, _indices_in_trace(trace.nodes), strict=True)
    )
    return LayerGraph(model, trace.inputs, trace.outputs, calls)


def _indices_in_trace(nodes: Sequence[Any]) -> list[int]:
    """For each node the number of earlier calls of its operation in the same trace."""
    seen: defaultdict[int, int] = defaultdict(int)
    indices: dict[int, int] = {}
    for node in sorted(nodes, key=_index_in_history):
        indices[id(node)] = seen[id(node.operation)]
        seen[id(node.operation)] += 1
    return [indices[id(node)] for node in nodes]


def node_of(element: Element) -> Any:
    """The node that an element speaks of.

    Raises:
        RuntimeError: nothing has called the layer yet.
    """
    layer, index = element.layer, element.node_index
    of_model = isinstance(
        element, ModelLayerPipelineStageAssignment | NestedModelPipelineStageAssignment
    )
    nodes = vars(layer).get(TRACED, []) if of_model else inbound_nodes(layer)
    if not nodes:
        raise RuntimeError(
            f"layer {layer.name} belongs to no graph yet: the model has not been built yet; "
            "call build() first"
        )
    if not 0 <= index < len(nodes):
        raise ValueError(f"layer {layer.name} has {len(nodes)} calls, and none of index {index}")
    return nodes[index]


def inbound_layers(node: Any) -> list[Any]:
    """The layers before a node, looking through operations that are no layers."""
    producers: dict[int, Any] = {}
    for parent in _parents(node):
        producers.setdefault(id(parent), parent.operation)
    return list(producers.values())


def _parents(node: Any) -> Iterator[Any]:
    for tensor in node.input_tensors:
        producer = producing_node(tensor)
        if producer is None:
            continue
        if isinstance(producer.operation, keras.Layer):
            yield producer
        else:
            yield from _parents(producer)


def _sequential_graph(model: Any) -> LayerGraph:
    functional = inner_functional(model)
    if functional is None:  # not built, or with inputs of which Keras makes no graph: a chain
        calls = tuple(Call(layer, None, 0) for layer in model.layers)
        return LayerGraph(model, None, None, calls)
    calls = tuple(Call(node.operation, node, 0) for node in function_nodes(functional))
    return LayerGraph(model, *function_structures(functional), calls)


def _index_in_history(node: Any) -> int:
    return next(
        index for index, candidate in enumerate(inbound_nodes(node.operation)) if candidate is node
    )

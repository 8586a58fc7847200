"""Trace the `call` of a Model subclass on symbolic inputs, so that its calls have nodes.

A `call` that has an argument `training` is traced once for each value, as it passes other arguments
to its layers. Both traces have to call the same layers in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.private.keras_graphs import (
    build_by_run,
    call_takes_training,
    has_unbuilt_layers,
    inbound_nodes,
    name_scope_of,
    noted_build_shapes,
    producing_node,
    traced_nodes,
)

TRACED = "_ipu_dynamo_traced_nodes"  # of a layer: its nodes in the last trace of a Model subclass


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace of `call`: nested symbolic inputs and outputs, and nodes between, in order.

    `training` is the trace with `training=True`; None if `call` does not take that argument.
    """

    specs: tuple[tuple[Any, ...], ...]
    inputs: Any
    outputs: Any
    nodes: tuple[Any, ...]
    training: "Trace | None" = None


def trace_of(model: Any) -> Trace:
    """The last trace of a Model subclass, made now if there is none.

    Raises:
        RuntimeError: the model has not been built.
    """
    state = state_of(model)
    if state.trace is None:
        if state.input_specs is None and (shapes := noted_build_shapes(model)):
            state.input_specs = symbolic_inputs(next(iter(shapes.values())))
        if state.input_specs is None:
            raise RuntimeError(
                f"model {model.name} has not been built yet: call build() with the shapes of its "
                "inputs, or with keras.Input objects"
            )
        state.trace = trace_model(model, state.input_specs)
        state.traces[state.trace.specs] = state.trace
        from ipu_dynamo.keras.stages.model_assignment import assign_from_blocks

        assign_from_blocks(model)
    assert isinstance(state.trace, Trace)
    return state.trace


def trace_model(model: Any, specs: Any) -> Trace:
    """Trace `call` on new inputs with the shapes and dtypes of `specs`, nested symbolic tensors.

    Raises:
        NotImplementedError: there is no `call`.
        ValueError: the outputs do not come from the inputs by layers and operations of Keras, or
            other layers are called in training.
    """
    if type(model).call is keras.Model.call:
        raise NotImplementedError(f"model {model.name} has no call method: define one")
    if has_unbuilt_layers(model):  # as plain Keras makes variables, under the same paths
        build_by_run(model, specs)
    if not call_takes_training(model):
        trace = _trace_once(model, specs, {})
    else:
        training = _trace_once(model, specs, {"training": True})
        trace = _trace_once(model, specs, {"training": False})
        if not same_calls(trace, training):
            raise ValueError(
                f"model {model.name} calls other layers when training is True, and can have no "
                "pipeline stages: call the same layers and hand training on to them"
            )
        trace = Trace(trace.specs, trace.inputs, trace.outputs, trace.nodes, training)
    note_nodes(trace)
    return trace


class _OwnState(keras.StatelessScope):  # type: ignore[misc]
    """Note which variables the traced `call` reads or assigns outside of layers.

    Such accesses have no node. A value that was read would stay as it was while tracing, and an
    assigned one would be lost. Within a layer's call Keras opens a scope of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[Any] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.touched.append(update[0])
        super().add_update(update)

    def get_current_value(self, variable: Any) -> Any:
        self.touched.append(variable)
        return super().get_current_value(variable)


def _trace_once(model: Any, specs: Any, arguments: dict[str, bool]) -> Trace:
    inputs = keras.tree.map_structure(
        lambda spec: keras.Input(batch_shape=spec.shape, dtype=spec.dtype), specs
    )
    with name_scope_of(model), _OwnState() as own:
        outputs = model.call(inputs, **arguments)
    if own.touched:
        raise ValueError(
            f"the call of model {model.name} reads or assigns variable {own.touched[0].path} by "
            "itself, and can have no pipeline stages: do that in a layer, or hand the variable to "
            "an operation of keras.ops together with what comes from the inputs"
        )
    flat = keras.tree.flatten(outputs)
    if not all(isinstance(tensor, keras.KerasTensor) for tensor in flat):
        raise ValueError(
            f"model {model.name} cannot be traced for pipeline stages, its call returns "
            f"{', '.join(type(value).__name__ for value in flat)}: compute its outputs from its "
            "inputs by layers and keras.ops only"
        )
    nodes = tuple(traced_nodes(keras.tree.flatten(inputs), flat))
    return Trace(flat_specs(specs), inputs, outputs, nodes)


def symbolic_inputs(shapes: Any) -> Any:
    """Nested symbolic tensors for nested shapes, or for tensors, whose dtypes count."""
    if _is_shape(shapes):
        return keras.KerasTensor(tuple(shapes))
    if isinstance(shapes, dict):
        return {key: symbolic_inputs(value) for key, value in shapes.items()}
    if isinstance(shapes, list | tuple):
        return type(shapes)(symbolic_inputs(value) for value in shapes)
    return keras.KerasTensor(tuple(shapes.shape), keras.backend.standardize_dtype(shapes.dtype))


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        size is None or isinstance(size, int) for size in value
    )


def flat_specs(specs: Any) -> tuple[tuple[Any, ...], ...]:
    """Shapes and dtypes of nested inputs, with their paths, for comparison."""
    return tuple(
        (path, tuple(spec.shape), str(keras.backend.standardize_dtype(spec.dtype)))
        for path, spec in keras.tree.flatten_with_path(specs)
    )


def same_calls(trace: Trace, other: Trace) -> bool:
    """Whether two traces call the same layers in the same order, on the results of the same calls.

    Constants may differ, as those that come from shapes do: each trace has its own.
    """
    return _signature(trace.nodes) == _signature(other.nodes)


def first_other_call(trace: Trace, other: Trace) -> str:
    """The name of the first call in `other` that `trace` does not have there."""
    before, now = _signature(trace.nodes), _signature(other.nodes)
    for index, node in enumerate(other.nodes):
        if index >= len(before) or before[index] != now[index]:
            return str(node.operation.name)
    return str(trace.nodes[len(now)].operation.name)


def _signature(nodes: Sequence[Any]) -> list[Any]:
    position = {id(node): index for index, node in enumerate(nodes)}
    return [
        (
            # operations that are no layers are made anew by each call
            id(node.operation) if isinstance(node.operation, keras.Layer) else type(node.operation),
            [position.get(id(producing_node(tensor))) for tensor in node.input_tensors],
        )
        for node in nodes
    ]


def note_nodes(trace: Trace) -> None:
    """Leave each layer its nodes in this trace, in order of its calls."""
    inside = {id(node) for node in trace.nodes}
    for operation in {id(node.operation): node.operation for node in trace.nodes}.values():
        nodes = [node for node in inbound_nodes(operation) if id(node) in inside]
        vars(operation)[TRACED] = nodes

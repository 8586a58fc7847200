"""Wrap Keras' private names about graphs, builds and files.

Checked on keras 3.15.1, as `keras_private.py`, which has the rest.
"""

from typing import Any

from ipu_dynamo.keras.private.keras_private import Functional, Model, Sequential


def nodes_in_post_order(nodes_by_depth: dict[int, list[Any]]) -> list[Any]:
    """Nodes of a graph as `Function._run_through_graph` runs them, without those of inputs."""
    depths = sorted(nodes_by_depth, reverse=True)
    return [node for depth in depths for node in nodes_by_depth[depth] if not node.is_input]


def function_nodes(model: Any) -> list[Any]:
    """The nodes of a Functional model, in the order in which they run."""
    return nodes_in_post_order(model._nodes_by_depth)


def function_structures(model: Any) -> tuple[Any, Any]:
    """The nested symbolic inputs and outputs of a Functional model."""
    return model._inputs_struct, model._outputs_struct


def traced_nodes(inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """The nodes between symbolic tensors, in the order in which a Functional would run them."""
    from keras.src.ops.function import map_graph

    nodes_by_depth: dict[int, list[Any]] = map_graph(inputs, outputs)[1]
    return nodes_in_post_order(nodes_by_depth)


def inner_functional(model: Any) -> Any:
    """The Functional that a built Sequential runs; None where Keras could not make it."""
    return model._functional


def inbound_nodes(operation: Any) -> list[Any]:
    """The history of an operation's symbolic calls, in order."""
    nodes: list[Any] = operation._inbound_nodes
    return nodes


def producing_node(tensor: Any) -> Any:
    """The node that made a symbolic tensor; None for one without a history."""
    history = getattr(tensor, "_keras_history", None)
    if history is None or history.operation is None:
        return None
    return history.operation._inbound_nodes[history.node_index]


def name_scope_of(model: Any) -> Any:
    """The scope in which a model's own variables and layers get their paths."""
    return model._open_name_scope()


def in_stateless_scope() -> bool:
    """Whether variables are created and read for a trace, and not for good."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope as inside

    return bool(inside())


def build_by_run(model: Any, specs: Any) -> None:
    """Run `call` on stand-ins, as `Layer._maybe_build` does, so that its layers are built."""
    from keras.src import backend, tree, utils

    if not model.built and not utils.is_default(model.build):
        model.build(tree.map_structure(lambda spec: spec.shape, specs))
    with name_scope_of(model):
        backend.compute_output_spec(model.call, specs)


def has_unbuilt_layers(model: Any) -> bool:
    """Whether some layer of a model, itself included, has not been built."""
    return not all(layer.built for layer in model._flatten_layers())


def flat_layers(model: Any) -> list[Any]:
    """All layers inside a model, at every depth."""
    return list(model._flatten_layers(include_self=False))


def call_takes_training(model: Any) -> bool:
    """Whether a model's `call` has an argument `training`."""
    return bool(model._call_has_training_arg)


def noted_build_shapes(model: Any) -> dict[str, Any] | None:
    """The arguments of a model's last `build`, which Keras writes into files."""
    shapes: dict[str, Any] | None = model._build_shapes_dict
    return shapes


def note_build_shapes(model: Any, shapes: dict[str, Any]) -> None:
    """Replace what `noted_build_shapes` reads."""
    model._build_shapes_dict = shapes


def seed_variables(model: Any) -> list[Any]:
    """The states of a model's seed generators, in the order of its variables."""
    generators = [
        generator
        for layer in model._flatten_layers(include_self=True)
        for generator in layer._seed_generators
    ]
    states = {id(generator.state) for generator in generators}
    return [variable for variable in model.variables if id(variable) in states]


def loads_as_functional(cls: type) -> bool:
    """Whether `from_config` of a class takes a Functional's configuration, with further keys."""
    from keras.src.models.functional import functional_like_constructor

    return bool(functional_like_constructor(cls))


KERAS_MODELS = (Model, Functional, Sequential)

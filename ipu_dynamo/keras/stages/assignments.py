"""Say on which pipeline stage an invocation of a layer runs: the elements of an assignment."""

from collections.abc import Sequence
from typing import Any

from ipu_dynamo.keras.private.keras_private import Functional, Sequential


class LayerAssignment:
    """An invocation of a layer, and its stage, which may be None.

    Args:
        layer: the layer that is called.
        node_index: which of its calls is meant.
        pipeline_stage: the stage that the call runs on.
    """

    is_nested_model = False

    def __init__(self, layer: Any, node_index: int, pipeline_stage: int | None = None) -> None:
        self._layer, self._node_index = layer, node_index
        self.pipeline_stage = pipeline_stage

    @property
    def layer(self) -> Any:
        """The layer that is called."""
        return self._layer

    @property
    def node_index(self) -> int:
        """Which of the layer's calls is meant."""
        return self._node_index

    @property
    def inbound_layers(self) -> list[Any]:
        """The layers whose outputs are inputs of this call."""
        from ipu_dynamo.keras.stages.layer_graph import inbound_layers, node_of

        return inbound_layers(node_of(self))

    def __str__(self) -> str:
        return (
            f"Layer: {self.layer.name} (node index {self.node_index}), "
            f"pipeline stage: {self.pipeline_stage}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


class NestedAssignment:
    """An invocation of a model inside a model, with the elements of its own layers.

    Args:
        nested_model: the model that is called.
        node_index: which of its calls is meant.
        pipeline_stage_assignments: elements for the nested model's own invocations.
    """

    is_nested_model = True

    def __init__(
        self, nested_model: Any, node_index: int, pipeline_stage_assignments: Sequence[Any]
    ) -> None:
        self._model, self._node_index = nested_model, node_index
        self._elements = pipeline_stage_assignments

    @property
    def nested_model(self) -> Any:
        """The model that is called."""
        return self._model

    layer = nested_model  # the graph's node is a call of the model

    @property
    def node_index(self) -> int:
        """Which of the model's calls is meant."""
        return self._node_index

    @property
    def inbound_layers(self) -> list[Any]:
        """The layers whose outputs are inputs of this call."""
        from ipu_dynamo.keras.stages.layer_graph import inbound_layers, node_of

        return inbound_layers(node_of(self))

    @property
    def pipeline_stage_assignments(self) -> list[Any]:
        """A copy of the list of the nested model's elements."""
        return list(self._elements)

    def __str__(self) -> str:
        elements = "; ".join(map(str, self._elements))
        return f"Nested model: {self.layer.name} (node index {self.node_index}), [{elements}]"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


class FunctionalLayerPipelineStageAssignment(LayerAssignment):
    """An invocation of a layer in a Functional model."""


class FunctionalNestedModelPipelineStageAssignment(NestedAssignment):
    """An invocation of a model in a Functional model."""


class ModelLayerPipelineStageAssignment(LayerAssignment):
    """An invocation of a layer in the last trace of a Model subclass."""


class NestedModelPipelineStageAssignment(NestedAssignment):
    """An invocation of a model in the last trace of a Model subclass."""


class SequentialLayerPipelineStageAssignment(LayerAssignment):
    """A layer of a Sequential model.

    Args:
        layer: the layer.
        pipeline_stage: the stage that it runs on.
    """

    def __init__(self, layer: Any, pipeline_stage: int | None = None) -> None:
        super().__init__(layer, 0, pipeline_stage)

    def __str__(self) -> str:
        return f"Layer: {self.layer.name}, pipeline stage: {self.pipeline_stage}"


class SequentialNestedModelPipelineStageAssignment(NestedAssignment):
    """A model in a Sequential model.

    Args:
        nested_model: the model.
        pipeline_stage_assignments: elements for its own layers.
    """

    def __init__(self, nested_model: Any, pipeline_stage_assignments: Sequence[Any]) -> None:
        super().__init__(nested_model, 0, pipeline_stage_assignments)

    def __str__(self) -> str:
        return f"Nested model: {self.layer.name}, [{'; '.join(map(str, self._elements))}]"


Element = LayerAssignment | NestedAssignment


def element_classes(model: Any) -> tuple[type[LayerAssignment], type[NestedAssignment]]:
    """The classes of elements for layers and for models inside `model`."""
    if isinstance(model, Sequential):
        return SequentialLayerPipelineStageAssignment, SequentialNestedModelPipelineStageAssignment
    if isinstance(model, Functional):
        return FunctionalLayerPipelineStageAssignment, FunctionalNestedModelPipelineStageAssignment
    return ModelLayerPipelineStageAssignment, NestedModelPipelineStageAssignment


def layer_element(model: Any, layer: Any, index: int, stage: int | None) -> LayerAssignment:
    """A new element for a call of a layer in `model`."""
    if isinstance(model, Sequential):
        return SequentialLayerPipelineStageAssignment(layer, stage)
    return element_classes(model)[0](layer, index, stage)


def nested_element(model: Any, nested: Any, index: int, elements: list[Any]) -> NestedAssignment:
    """A new element for a call of the model `nested` in `model`."""
    if isinstance(model, Sequential):
        return SequentialNestedModelPipelineStageAssignment(nested, elements)
    return element_classes(model)[1](nested, index, elements)

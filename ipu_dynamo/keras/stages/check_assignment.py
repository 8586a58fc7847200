"""Check that an assignment fits a model's graph, names a stage everywhere, and flows forward."""

from collections.abc import Sequence
from typing import Any

from ipu_dynamo.keras.private.keras_private import Functional, Sequential
from ipu_dynamo.keras.stages.assignments import (
    Element,
    element_classes,
    layer_element,
    nested_element,
)
from ipu_dynamo.keras.stages.layer_graph import Call, LayerGraph, layer_graph
from ipu_dynamo.keras.stages.stage_flow import flow


def check_assignment(model: Any, assignment: Any) -> list[Element]:
    """The elements of a valid assignment; integers, where they are allowed, become elements.

    Raises:
        ValueError: it is not valid; what is wrong is looked for in the order of this module.
    """
    graph = layer_graph(model)
    plain_sequential = isinstance(model, Sequential) and not any(
        call.is_model for call in graph.calls
    )
    _check_list(model, graph, assignment)
    if isinstance(model, Sequential):
        _check_kinds(model, assignment)
    if not isinstance(model, Functional) and all(map(is_stage_number, assignment)):
        assignment = [
            spread(model, call, stage)
            for call, stage in zip(graph.layer_calls, assignment, strict=True)
        ]
    if plain_sequential:
        check_layers_by_index(graph, assignment)
    else:
        check_structure(graph, assignment)
    check_stages(assignment)
    if plain_sequential:
        _check_steps(graph, assignment)
    else:
        flow(graph, assignment)
    return list(assignment)


def spread(model: Any, call: Call, stage: int | None) -> Element:
    """The element of a call, with one stage for all that is inside it."""
    if not call.is_model:
        return layer_element(model, call.operation, call.index, stage)
    inner = [
        spread(call.operation, nested, stage) for nested in layer_graph(call.operation).layer_calls
    ]
    return nested_element(model, call.operation, call.index, inner)


def is_stage_number(value: Any) -> bool:
    """Whether a value can stand for a stage: an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_list(model: Any, graph: LayerGraph, assignment: Any) -> None:
    if not isinstance(assignment, list):
        raise ValueError(
            f"the pipeline stage assignment of model {model.name} needs to be a list, "
            f"and is of type {type(assignment).__name__}"
        )
    if len(assignment) != len(graph.layer_calls):
        raise ValueError(
            f"the length of the pipeline stage assignment, {len(assignment)}, does not match the "
            f"number of layers in the graph of model {model.name}, {len(graph.layer_calls)} (input "
            "layers are excluded, each call of a layer counts): begin with "
            "get_pipeline_stage_assignment()"
        )


def _check_kinds(model: Any, assignment: list[Any]) -> None:
    classes = element_classes(model)
    numbers = all(map(is_stage_number, assignment))
    if not numbers and not all(isinstance(element, classes) for element in assignment):
        raise ValueError(
            f"All elements of the pipeline stage assignment of model {model.name} must be "
            f"integers, or all must be instances of {_names(classes)}; there are "
            f"{', '.join(sorted({type(element).__name__ for element in assignment}))}"
        )


def check_structure(graph: LayerGraph, assignment: Sequence[Any]) -> None:
    """Check classes of elements, and their order, at every depth."""
    classes = element_classes(graph.model)
    for position, element in enumerate(assignment):
        if not isinstance(element, classes):
            raise ValueError(
                f"element {position} of the pipeline stage assignment of model {graph.model.name} "
                f"must be an instance of {_names(classes)}, and is {element!r}"
            )
    for position, (call, element) in enumerate(zip(graph.layer_calls, assignment, strict=True)):
        if not _is_call(graph, call, element):
            raise ValueError(
                f"the order of the pipeline stage assignment of model {graph.model.name} does not "
                f"match the post-order of its layers: element {position} is layer "
                f"{_label(graph, element.layer, element.node_index)}, and layer "
                f"{_label(graph, call.operation, call.index)} runs there"
            )
        if call.is_model != element.is_nested_model:
            raise ValueError(
                f"element {position}, layer {call.operation.name}, must be an instance of "
                f"{classes[call.is_model].__name__}, and is {element!r}"
            )
        if isinstance(element, classes[1]):
            inner = layer_graph(call.operation)
            elements = element.pipeline_stage_assignments
            _check_list(call.operation, inner, elements)
            check_structure(inner, elements)


def _is_call(graph: LayerGraph, call: Call, element: Element) -> bool:
    same_layer = element.layer is call.operation
    return same_layer and (isinstance(graph.model, Sequential) or element.node_index == call.index)


def _label(graph: LayerGraph, layer: Any, index: int) -> str:
    if isinstance(graph.model, Sequential):
        return str(layer.name)
    calls = sum(call.operation is layer for call in graph.layer_calls)
    of_calls = f" of {calls} calls" if calls else ""
    return f"{layer.name} (node index {index}{of_calls})"


def _names(classes: tuple[type, ...]) -> str:
    return " or ".join(cls.__name__ for cls in classes)


def check_layers_by_index(graph: LayerGraph, assignment: Sequence[Any]) -> None:
    """Check the layers of a Sequential's assignment."""
    for position, (call, element) in enumerate(zip(graph.layer_calls, assignment, strict=True)):
        if element.layer is not call.operation:
            raise ValueError(
                f"the assignment has layer {element.layer.name} at index {position}, where model "
                f"{graph.model.name} has layer {call.operation.name}"
            )


def check_stages(assignment: Sequence[Any]) -> None:
    """Check that every element has a stage, at every depth."""
    for element in assignment:
        if element.is_nested_model:
            check_stages(element.pipeline_stage_assignments)
            continue
        stage = element.pipeline_stage
        if stage is None:
            raise ValueError(
                f"layer {element.layer.name} (node index {element.node_index}) has not been "
                "assigned a pipeline stage: set pipeline_stage of every element"
            )
        if not is_stage_number(stage) or stage < 0:
            raise ValueError(
                f"layer {element.layer.name}: the pipeline stage is {stage!r}, and has to be an "
                "integer from 0 on"
            )


def _check_steps(graph: LayerGraph, assignment: Sequence[Any]) -> None:
    """Check that the stages of a chain begin with 0, and grow by at most one."""
    before = None
    for element in assignment:
        stage = element.pipeline_stage
        if before is None and stage != 0:
            raise ValueError(
                f"The first layer of model {graph.model.name}, {element.layer.name}, has to be on "
                f"stage 0, and is on stage {stage}"
            )
        if before is not None and stage not in (before, before + 1):
            raise ValueError(
                f"layer {element.layer.name} is on stage {stage}: after stage {before} a layer has "
                f"to be on stage {before} or on stage {before + 1}"
            )
        before = stage

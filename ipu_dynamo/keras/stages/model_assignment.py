"""Read, set and reset a model's assignment, whether users or `PipelineStage` blocks made it."""

import logging
from collections.abc import Sequence
from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.stages.assignments import (
    Element,
    NestedAssignment,
    layer_element,
    nested_element,
)
from ipu_dynamo.keras.stages.check_assignment import check_assignment, spread
from ipu_dynamo.keras.stages.layer_graph import Call, layer_graph
from ipu_dynamo.keras.stages.pipeline_stage import stage_of_call

logger = logging.getLogger("ipu_dynamo.keras")


def current_assignment(model: Any) -> list[Element]:
    """A copy of the list that was set, else new elements without stages."""
    state = state_of(model)
    if state.assignment is None:
        graph = layer_graph(model)  # may trace the model, which may find stages in its `call`
        if state.assignment is None:
            return [_element(model, call) for call in graph.layer_calls]
    if state.invalid is not None:
        logger.info(
            "the pipeline stage assignment of model %s is from before %s", model.name, state.invalid
        )
    return list(state.assignment)


def set_assignment(model: Any, assignment: Any) -> None:
    """Check and store an assignment, and drop compiled programs."""
    checked = check_assignment(model, assignment)
    _store(model, checked, from_blocks=False)


def reset_assignment(model: Any) -> None:
    """Make a model one that is not pipelined."""
    _store(model, None, from_blocks=False)


def assign_from_blocks(model: Any) -> None:
    """Set the assignment that `PipelineStage` blocks describe, if there were any.

    Raises:
        ValueError: they leave a layer out, or describe no valid assignment.
    """
    state = state_of(model)
    if state.assignment is not None and not state.from_blocks:
        return
    calls = layer_graph(model).layer_calls
    if not any(_has_stage(call) for call in calls):
        return
    _store(model, check_assignment(model, [_marked(model, call) for call in calls]), True)


def invalidate_assignment(model: Any, reason: str) -> None:
    """Note that a Sequential has changed after its assignment was set."""
    state = state_of(model)
    if state.assignment is not None:
        state.invalid = reason
        state.programs.clear()
        logger.info(
            "the pipeline stage assignment of model %s is no longer valid: %s", model.name, reason
        )


def _store(model: Any, assignment: list[Element] | None, from_blocks: bool) -> None:
    state = state_of(model)
    state.assignment, state.from_blocks, state.invalid = assignment, from_blocks, None
    state.programs.clear()


def _has_stage(call: Call) -> bool:
    if call.is_model:
        return state_of(call.operation).from_blocks
    return stage_of_call(call.operation, call.node) is not None


def _marked(model: Any, call: Call) -> Element:
    """The element of a call as blocks describe it.

    Raises:
        ValueError: there was no block for it.
    """
    if call.is_model:
        if state_of(call.operation).assignment is not None:
            return _element(model, call)
    else:
        stage = stage_of_call(call.operation, call.node)
        if stage is not None:
            return spread(model, call, stage)
    raise ValueError(
        f"layer {call.operation.name} of model {model.name} has not been assigned a pipeline "
        "stage, others have: make or call each layer in a PipelineStage, or none"
    )


def _element(model: Any, call: Call) -> Element:
    """The element of a call: without a stage, or for a nested model with that one's elements."""
    if not call.is_model:
        return spread(model, call, None)
    inner = current_assignment(call.operation)
    return nested_element(model, call.operation, call.index, _copies(call.operation, inner))


def _copies(model: Any, elements: Sequence[Element]) -> list[Element]:
    """Elements of their own, so that two calls of one nested model may have other stages."""
    return [
        nested_element(
            model,
            element.layer,
            element.node_index,
            _copies(element.layer, element.pipeline_stage_assignments),
        )
        if isinstance(element, NestedAssignment)
        else layer_element(model, element.layer, element.node_index, element.pipeline_stage)
        for element in elements
    ]

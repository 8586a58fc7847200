"""Plan the execution of a pipelined model: its calls, by stage, in a valid order."""

from dataclasses import dataclass
from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.attach.refusals import check_pipelined
from ipu_dynamo.keras.private.keras_private import Functional, Sequential
from ipu_dynamo.keras.stages.check_assignment import (
    check_layers_by_index,
    check_stages,
    check_structure,
)
from ipu_dynamo.keras.stages.layer_graph import layer_graph
from ipu_dynamo.keras.stages.model_assignment import assign_from_blocks
from ipu_dynamo.keras.stages.model_build import has_stages
from ipu_dynamo.keras.stages.stage_flow import StagedGraph, flow
from ipu_dynamo.keras.stages.trace_model import (
    first_other_call,
    flat_specs,
    note_nodes,
    same_calls,
    symbolic_inputs,
    trace_model,
    trace_of,
)


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of a layer, a model or an operation, and the stage that it runs on.

    Args:
        operation: the called layer, model or operation.
        node: Keras' node, with arguments and outputs; None in a Sequential without a graph, whose
            layers are called one on the result of the other.
        node_index: the index that users see; 0 in a Sequential.
        stage: its stage; of a nested model the latest one inside.
        nested: the plan of a nested model's own calls.
    """

    operation: Any
    node: Any
    node_index: int
    stage: int
    nested: "StagePlan | None" = None


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The calls of a model, by stage, and within a stage in post order: each after its inputs.

    Args:
        model: the model.
        num_stages: how many stages the whole pipeline has, also in a nested plan.
        inputs: nested symbolic tensors, which nodes refer to; None without a graph.
        outputs: the same, of the results.
        invocations: the calls.
    """

    model: Any
    num_stages: int
    inputs: Any
    outputs: Any
    invocations: tuple[Invocation, ...]


def stage_plan(model: Any, inputs: Any = None, *, training: bool = False) -> StagePlan | None:
    """The plan of a model; None for one that is not pipelined.

    To be called at each execution: programs of other stages are dropped.

    Args:
        model: the model.
        inputs: nested tensors, or objects with their shapes and dtypes; needed for Model
            subclasses, which are traced for them.
        training: which of the two traces of a Model subclass is used.

    Raises:
        ValueError: the assignment does not fit the model any more.
        RuntimeError: there is a stage without a layer, or a method that stages would leave out.
    """
    state = state_of(model)
    if not isinstance(model, Functional | Sequential):
        _trace_for(model, None if inputs is None else symbolic_inputs(inputs))
    elif isinstance(model, Sequential):
        assign_from_blocks(model)
    if state.assignment is None:
        return None
    check_pipelined(model)
    _check_fit(model)
    staged = flow(layer_graph(model, training=training), state.assignment, training=training)
    _check_filled(model, staged)
    stages = _stages(staged)
    if state.planned != stages:
        state.programs.clear()
        state.planned = stages
    return _plan(staged, max(stages) + 1)


def _trace_for(model: Any, specs: Any) -> None:
    """Bring the trace of a Model subclass up to the inputs of an execution, if it has stages."""
    state = state_of(model)
    if state.assignment is None:
        if specs is None or not has_stages(model, specs):
            return
        state.trace = None
        state.input_specs = specs
        trace_of(model)
        return
    if specs is None or trace_of(model).specs == flat_specs(specs):
        return
    trace = state.traces.get(flat_specs(specs)) or trace_model(model, specs)
    if not same_calls(trace_of(model), trace):
        raise ValueError(
            f"the pipeline stage assignment of model {model.name} is no longer valid: for inputs "
            f"of {_text(specs)} it calls other layers, or in another order, from "
            f"{first_other_call(trace_of(model), trace)} on; set a new one"
        )
    state.traces[trace.specs] = trace
    state.trace, state.input_specs = trace, specs
    note_nodes(trace)


def _text(specs: Any) -> str:
    return ", ".join(f"{dtype} {shape}" for _, shape, dtype in flat_specs(specs))


def _check_fit(model: Any) -> None:
    state = state_of(model)
    assert state.assignment is not None
    problem = state.invalid
    if problem is None:
        graph = layer_graph(model)
        nested = any(call.is_model for call in graph.calls)
        if len(graph.layer_calls) != len(state.assignment):
            numbers = f"{len(state.assignment)} elements, {len(graph.layer_calls)} calls of layers"
            problem = f"it has {numbers}, the last of them {graph.layer_calls[-1].operation.name}"
        try:
            if problem is None and isinstance(model, Sequential) and not nested:
                check_layers_by_index(graph, state.assignment)
            elif problem is None:
                check_structure(graph, state.assignment)
            check_stages(state.assignment)  # elements may have changed since they were set
        except ValueError as error:
            problem = str(error)
    if problem is not None:
        raise ValueError(
            f"the pipeline stage assignment of model {model.name} is no longer valid: {problem}; "
            "set a new one"
        )


def _stages(staged: StagedGraph) -> tuple[int, ...]:
    """The stage of every call of a layer, at every depth."""
    stages: list[int] = []
    for call in staged.calls:
        if call.inner is not None:
            stages += _stages(call.inner)
        elif call.call.is_layer:
            stages.append(call.stage)
    return tuple(stages)


def _check_filled(model: Any, staged: StagedGraph) -> None:
    stages = _stages(staged)
    empty = sorted({*range(max(stages) + 1)} - {*stages})
    if empty:
        raise RuntimeError(
            f"model {model.name} is assigned to pipeline stages up to {max(stages)}, and no layer "
            f"is on stages {empty}: assign layers to every stage"
        )


def _plan(staged: StagedGraph, num_stages: int) -> StagePlan:
    invocations = [
        Invocation(
            staged_call.call.operation,
            staged_call.call.node,
            staged_call.call.index,
            staged_call.stage,
            None if staged_call.inner is None else _plan(staged_call.inner, num_stages),
        )
        for staged_call in staged.calls
    ]
    invocations.sort(key=lambda invocation: invocation.stage)  # stable: post order within a stage
    graph = staged.graph
    return StagePlan(graph.model, num_stages, graph.inputs, graph.outputs, tuple(invocations))

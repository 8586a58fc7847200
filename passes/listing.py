"""List the levels that are not read back: steps of optimisers, graphs cut by rows, host programs.

A listing is for readers. Recorded steps name objects of the user's optimiser, for example.
"""

from collections.abc import Iterator, Sequence

from torch import fx

from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.capture.update.trace_step import RecordedStep
from ipu_dynamo.passes.levels import SplitCapture, Update
from ipu_dynamo.passes.micro_batch.placements import Kind
from ipu_dynamo.passes.update_levels import (
    JOINT,
    UpdateFunctions,
    UpdateGraphs,
    UpdatePlan,
    UpdateStep,
)
from ipu_dynamo.program import Function, HostProgram, graph_outputs
from ipu_dynamo.program.text.operator_text import operator_text, value_text

_COLUMN = 96  # where notes begin


def listing(model: SplitCapture | Update) -> str:
    """List operators with their types and annotations of the level; then the level's tables."""
    if isinstance(model, SplitCapture):
        return "\n".join(_split_lines(model))
    if isinstance(model, Function):
        return f"{model}\n{model.listing()}"
    if isinstance(model, UpdateFunctions):
        return "\n".join(_functions_lines(model))
    return "\n".join(_update_lines(model))


def host_lines(host: HostProgram) -> Iterator[str]:
    """The work of this computer, for people; host passes begin with the program's text."""
    yield host.runs.listing(here=True)
    for function in host.runs.functions:
        yield f"{function}\n{function.listing()}"
    if host.fused is not None:
        yield f"fused {host.fused.function}\n{host.fused.function.listing()}"
    if host.threads is not None:
        yield f"threads: {host.threads}"
    yield from (f"decision {decision}" for decision in host.decisions)
    for recipe in host.recipes.values():
        yield f"recipe {recipe}"
        if recipe.lowered is not recipe.function:
            yield recipe.lowered.listing()


def _split_lines(model: SplitCapture) -> Iterator[str]:
    yield f"{model.split.n} micro-batches"
    for node, placements in model.split.at.items():
        placed = placements if isinstance(placements, tuple) else (placements,)
        names = ", ".join(at.name if isinstance(at, Kind) else str(at) for at in placed)
        text = value_text(node) if node.op == "placeholder" else operator_text(node)
        yield f"{text:<{_COLUMN}}  # {names}"


def _update_lines(update: RecordedUpdate | UpdateGraphs) -> Iterator[str]:
    steps: Sequence[RecordedStep | UpdateStep] = update.steps
    for number, step in enumerate(steps):
        recorded = step.recorded if isinstance(step, UpdateStep) else step
        names = recorded.world.names
        yield f"step {number} of {len(steps)}"
        roles = [*names, *(f"gradient of {name}" for name in names)]
        roles += [leaf.path for leaf in recorded.taken]
        for node, role in zip(step.graph.graph.find_nodes(op="placeholder"), roles, strict=True):
            yield f"{f'  input {value_text(node)}':<{_COLUMN}}  # {role}"
        for node in step.graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                text = f"  {operator_text(node)}"
                owner = _owner_text(step, node) if isinstance(step, UpdateStep) else ""
                yield f"{text:<{_COLUMN}}  # {owner}" if owner else text
        nodes = iter(graph_outputs(step.graph))
        for result in recorded.results:
            value = f"%{next(nodes).name}" if result.in_graph else repr(result.constant)
            yield f"  return {result.path} = {value}"
        if isinstance(step, UpdateStep):
            yield from (f"  holds if %{node.name}  # {line}" for node, line in step.conditions)
        else:
            yield from (
                f"  holds if {expression}  # {line}" for expression, line in step.conditions
            )
    if isinstance(update, UpdateGraphs) and update.plan is not None:
        yield from _plan_lines(update.plan, update.steps[-1].world.names)


def _owner_text(step: UpdateStep, node: fx.Node) -> str:
    if node not in step.places:
        return ""
    place = step.places[node]
    owner = "joint" if place.owner == JOINT else step.world.names[place.owner]
    return f"{owner}, round {place.round}"


def _plan_lines(plan: UpdatePlan, names: Sequence[str]) -> Iterator[str]:
    for path, counter in plan.counters.items():
        yield f"counter {counter.name}: {counter.type} = {counter.initial}  # {path}"
    for path in plan.hyperparameters:
        yield f"hyperparameter {path}"
    for name, states in zip(names, plan.states, strict=True):
        yield from (f"state {s.key} of {name}: {s.type}  # {s.path}" for s in states)
    for state in plan.shared:
        yield f"state {state.key}: {state.type}  # {state.path}"


def _functions_lines(update: UpdateFunctions) -> Iterator[str]:
    for number, step in enumerate(update.steps):
        yield f"step {number} of {len(update.steps)}"
        yield f"  ({', '.join(step.results)}) = {step.factors.name}"
        for turn in step.rounds:
            for name, part in turn.parts.items():
                yield f"  ({', '.join(part.results)}) = {part.function} of {name}"
            yield f"  ({', '.join(turn.results)}) = {turn.function}({', '.join(turn.arguments)})"
        for name, piece in step.functions.items():
            yield f"  update {name} by {piece}({', '.join(step.arguments[name])})"
        for function in (step.factors, *step.pieces.values()):
            yield f"{function}\n{function.listing()}"
    yield from _plan_lines(update.plan, update.traced.names)

"""Say where each value of a step is computed: with a parameter, or of several parameters together.

Before   %s = aten.add(%norm_a, %norm_b);   %b1 = aten.mul(%a1, %s), the next value of %b
After    the same with an owner for each value: %s is joint, in round 0, %a1 is of %a in round 0;
         %c = aten.clone(%b1), joint: what was computed with %a becomes a value of %b
Keeps    every result. Values of one parameter are computed where it is, those of several on one
         IPU, in rounds: a round takes what parameters compute from the rounds before it.
         Hyperparameters, counters, and values of these alone have no owner.
Source   LAMB and gradient centralisation, whose updates need norms.
"""

from collections.abc import Mapping

from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.graph.builder import call_on
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.step_graphs import each_step, is_number
from ipu_dynamo.passes.update_levels import JOINT, UpdateGraphs, UpdatePlace, UpdatePlan, UpdateStep
from ipu_dynamo.program import graph_outputs


def owners_of(step: UpdateStep, plan: UpdatePlan) -> dict[fx.Node, int]:
    """The parameter, or `JOINT`, that each placeholder of a tensor belongs to."""
    leaves = step.leaves
    owners: dict[fx.Node, int] = {}
    for number, pair in enumerate(zip(step.parameters, step.gradients, strict=True)):
        owners |= dict.fromkeys(pair, number)
    for number, states in enumerate(plan.states):
        owners |= {leaves[s.path]: number for s in states if s.path in leaves}
    return owners | {leaves[s.path]: JOINT for s in plan.shared if s.path in leaves}


def _places(graph: fx.Graph, owners: Mapping[fx.Node, int]) -> dict[fx.Node, UpdatePlace]:
    """Where each value is computed that depends on some placeholders.

    Args:
        owners: of these placeholders; a parameter's index, or `JOINT`.
    """
    found: dict[fx.Node, UpdatePlace] = {}
    for node in graph.nodes:
        if node in owners:
            found[node] = UpdatePlace(owners[node], 0)
            continue
        inputs = [source for source in node.all_input_nodes if source in found]
        if not inputs or node.op == "output":
            continue
        own = {found[source].owner for source in inputs} - {JOINT}
        has_joint = any(found[source].owner == JOINT for source in inputs)
        # a sum of numbers, parameter by parameter, is one round, and not one for each
        continues = has_joint and all(map(is_number, inputs))
        if len(own) == 1 and not continues:
            rounds = [found[s].round + (found[s].owner == JOINT) for s in inputs]
            found[node] = UpdatePlace(own.pop(), max(rounds))
        else:
            found[node] = UpdatePlace(JOINT, max(found[source].round for source in inputs))
    return found


def _assign(step: UpdateStep, plan: UpdatePlan) -> bool:
    """Assign owners, and copy each value that another parameter takes over: the copy is joint."""
    if step.places:
        return False
    graph = step.graph.graph
    step.places |= _places(graph, owners_of(step, plan))
    output = graph.output_node()
    in_graph = [result.path for result in step.recorded.results if result.in_graph]
    index = {path: i for i, path in enumerate(in_graph)}
    values, copies = list(graph_outputs(step.graph)), dict[fx.Node, fx.Node]()
    for number, states in enumerate(plan.states):
        for path in (f"parameter {number}", *(state.path for state in states)):
            node = values[index[path]] if path in index else None
            if node not in step.places or step.places[node].owner in (JOINT, number):
                continue
            if node not in copies:
                with graph.inserting_before(output):
                    copies[node] = call_on(graph, aten.clone.default, node)
                step.places[copies[node]] = UpdatePlace(JOINT, step.places[node].round)
            values[index[path]] = copies[node]
    output.args = (values,)
    return True


class AssignOwners(Pass):
    """The pass."""

    level = "update"
    needed = "a parameter is updated on its own IPU"

    def __call__(self, update: UpdateGraphs) -> bool:
        plan = update.plan
        assert plan is not None, "PlanUpdate comes before"
        return each_step(update, lambda step: _assign(step, plan))

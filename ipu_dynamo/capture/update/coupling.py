"""Say where each value of a step is computed: with a parameter, or of several parameters together.

Values that hang on one parameter's tensors are computed where it lives; what hangs on those of
several, on one IPU, in rounds: a round takes what parameters compute from the rounds before it.
Hyperparameters, counters, and what hangs on nothing else, are no part of this.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ipu_dynamo.capture.update.lower_step import Lowered
from ipu_dynamo.capture.update.step_graphs import is_number

JOINT = -1  # in the place of a parameter


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is computed.

    Args:
        owner: index of the parameter; `JOINT`: several together.
        round: of a parameter's value, how many rounds it takes before; else its own round.
    """

    owner: int
    round: int


def places(graph: fx.Graph, owners: Mapping[fx.Node, int]) -> dict[fx.Node, Place]:
    """Where each value is computed that hangs on some placeholders.

    Args:
        owners: of these placeholders; a parameter's index, or `JOINT`.
    """
    found: dict[fx.Node, Place] = {}
    for node in graph.nodes:
        if node in owners:
            found[node] = Place(owners[node], 0)
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
            found[node] = Place(own.pop(), max(rounds))
        else:
            found[node] = Place(JOINT, max(found[source].round for source in inputs))
    return found


def owners_of_states(step: Lowered, paths: Collection[str]) -> dict[str, int]:
    """Of states that the optimiser keeps for no parameter by name, those that belong to one.

    Through tensors with dimensions, the results that hang on such a state hang on no other
    parameter's tensors: what couples parameters by numbers alone does not count.
    """
    sources = {step.leaves[path]: path for path in paths if path in step.leaves}
    own: dict[fx.Node, int] = {}
    for place, pair in enumerate(zip(step.parameters, step.gradients, strict=True)):
        own |= dict.fromkeys(pair, place)
    for path, leaf in step.inputs.items():
        if leaf.parameter is not None and path in step.leaves:
            own[step.leaves[path]] = leaf.parameter
    reached: dict[fx.Node, frozenset[fx.Node]] = {}
    meets: dict[fx.Node, set[int]] = {source: set() for source in sources}
    for node in step.graph.nodes:
        if node in own or node in sources:
            reached[node] = frozenset((node,)) if not is_number(node) else frozenset()
            continue
        if is_number(node) or node.op == "output":
            reached[node] = frozenset()
            continue
        reached[node] = frozenset().union(*(reached[s] for s in node.all_input_nodes))
        parameters = {own[source] for source in reached[node] if source in own}
        for source in reached[node]:
            if source in meets:
                meets[source] |= parameters
    return {sources[s]: next(iter(of)) for s, of in meets.items() if len(of) == 1}


def values_between(
    graph: fx.Graph,
    place: Mapping[fx.Node, Place],
    wanted: Collection[fx.Node],
    joint_results: Sequence[fx.Node],
) -> list[list[fx.Node]]:
    """For each round, the parameters' values that it takes and none before it took, in order.

    Args:
        wanted: nodes that are needed at all.
        joint_results: values that a round has to have, whoever computes them.
    """
    first: dict[fx.Node, int] = {}

    def take(node: fx.Node, by: int) -> None:
        if node in place and place[node].owner != JOINT:
            first[node] = min(first.get(node, by), by)

    for node in graph.nodes:
        if node in wanted and node in place and place[node].owner == JOINT:
            for source in node.all_input_nodes:
                take(source, place[node].round)
    for node in joint_results:
        if node in place:
            take(node, place[node].round)
    rounds = [p.round for n, p in place.items() if n in wanted and p.owner == JOINT
              and n.op != "placeholder"]  # fmt: skip
    rounds += [place[n].round for n in joint_results if n in place]
    count = 1 + max(rounds) if rounds else 0
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [
        sorted((n for n, at in first.items() if at == number), key=order.__getitem__)
        for number in range(count)
    ]

"""Price the operators of a call: roles of its arguments decide.

Convolutions that an IPU runs side by side share its tiles in proportion to their FLOPs. The slowest
counts: each has its share of the cycles of the slowest.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ipu_dynamo.machine.cost import Bounds, Cost, Resources, Roles
from ipu_dynamo.machine.costs.table import price
from ipu_dynamo.program.machine_operators import MachineOperator
from ipu_dynamo.program.text.graph_text import GROUP


@dataclass(frozen=True, slots=True)
class Argument:
    """The role of an argument of a call.

    Args:
        origin: `weight` is a variable of the program, or its copy on another IPU; `host` comes from
            the host, and no other call reads it.
        dies: no later instruction reads it.
    """

    origin: Literal["weight", "host", "value"] = "value"
    dies: bool = False


def price_call(
    operators: Sequence[MachineOperator], arguments: Sequence[Argument], resources: Resources
) -> tuple[Cost, ...]:
    """Price each operator of a call.

    Args:
        operators: of its function, as `machine_operators` lists them.
        arguments: of the call, one for each input of the function.
    """
    readers = Counter(_sources(operators))

    def roles(operator: MachineOperator) -> Roles:
        weights, from_host, dying = set(), set(), set(operator.dying)
        for place, source in enumerate(operator.sources):
            if source is None:
                continue
            argument = Argument("weight") if source == "constant" else arguments[source]
            if argument.origin == "weight":
                weights.add(place)
            if argument.origin == "host" and readers[source] == 1:
                from_host.add(place)
            if argument.origin == "weight" or not argument.dies:
                dying.discard(place)
        bodies = tuple(tuple(map(roles, body)) for body in operator.bodies)
        return Roles(frozenset(weights), frozenset(from_host), frozenset(dying), bodies)

    known = [roles(operator) for operator in operators]
    costs = [price(each, resources, role) for each, role in zip(operators, known, strict=True)]
    for group in _side_by_side(operators):
        members = [(operators[i], known[i]) for i in group]
        shared = _sharing_tiles(members, [costs[i].flops for i in group], resources)
        for i, cost in zip(group, shared, strict=True):
            costs[i] = cost
    return tuple(costs)


def _sources(operators: Iterable[MachineOperator]) -> Iterator[object]:
    """The sources of all operands, those within bodies, too."""
    for operator in operators:
        yield from operator.sources
        for body in operator.bodies:
            yield from _sources(body)


def _side_by_side(operators: Sequence[MachineOperator]) -> Iterator[list[int]]:
    """The places of the operators of each group that runs side by side."""
    group: list[int] = []
    for place, operator in enumerate(operators):
        mark = operator.node.meta.get(GROUP, "") if operator.node is not None else ""
        plan, _, position = mark.partition(" ")
        if plan != "parallel":
            continue
        number, _, count = position.partition("/")
        group = [place] if number == "1" else [*group, place]
        if number == count and len(group) == int(count):
            yield group


def _sharing_tiles(
    members: Sequence[tuple[MachineOperator, Roles]], flops: Sequence[int], resources: Resources
) -> list[Cost]:
    """The costs of operators that run side by side, each on its share of the tiles."""
    tiles, ipu_tiles = resources.tiles, int(resources.ipu.tiles)
    shares = [each / max(sum(flops), 1) for each in flops]
    costs, bounds = [], Bounds()
    for (operator, roles), share in zip(members, shares, strict=True):
        own = max(int(tiles * share), 1)
        cost = price(operator, replace(resources, io_tiles=ipu_tiles - own), roles)
        costs.append(cost)
        bounds += cost.bounds * (own / tiles)
    slowest = max(costs, key=lambda cost: cost.cycles)
    return [
        replace(
            slowest * share,
            plan=cost.plan,
            temporary=cost.temporary,
            flops=cost.flops,
            bounds=bounds * share,
            exchanges=cost.exchanges,
            in_place=cost.in_place,
            warning=cost.warning,
            parts=cost.parts,
        )
        for cost, share in zip(costs, shares, strict=True)
    ]

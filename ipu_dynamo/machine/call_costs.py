"""Price the operators of a call: what its arguments are decides what is rearranged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.machine.cost import Cost, Resources, Roles
from ipu_dynamo.machine.costs.table import price
from ipu_dynamo.program.machine_operators import MachineOperator


@dataclass(frozen=True, slots=True)
class Argument:
    """What a call gives to a function.

    Args:
        origin: a variable of the program, or its copy on another IPU, is a `weight`; what the host
            sends for this call alone comes from the `host`.
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
    readers = [source for operator in operators for source in operator.sources]

    def roles(operator: MachineOperator) -> Roles:
        weights, from_host, dying = set(), set(), set(operator.dying)
        for place, source in enumerate(operator.sources):
            if source is None:
                continue
            argument = Argument("weight") if source == "constant" else arguments[source]
            if argument.origin == "weight":
                weights.add(place)
            if argument.origin == "host" and readers.count(source) == 1:
                from_host.add(place)
            if not argument.dies or argument.origin == "weight":
                dying.discard(place)
        return Roles(frozenset(weights), frozenset(from_host), frozenset(dying))

    return tuple(price(operator, resources, roles(operator)) for operator in operators)

"""Price operators that go over their results once, vector by vector."""

from collections.abc import Mapping
from dataclasses import replace

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.program.machine_operators import MachineOperator

_UNKNOWN = Figure(4, "cycles/vector", "M", "no formula")


def unknown(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """Guess the price of an operator without a formula: a slow pass over its results."""
    cost = basics.run(resources)
    cost += basics.touching(basics.machine_bytes(*operator.results), resources)
    for result in operator.results:
        cost += basics.vectors(basics.numel(result), result.dtype, _UNKNOWN, resources)
    return replace(cost, known=False)


PRICES: Mapping[str, Price] = {}

"""Find the price of an operator by its name: the table from operators to classes of cost."""

from collections.abc import Mapping

from ipu_dynamo.machine.cost import NO_ROLES, Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import convolutions, elementwise, products
from ipu_dynamo.program.machine_operators import MachineOperator

_PRICES: Mapping[str, Price] = {
    **products.PRICES,
    **convolutions.PRICES,
    **elementwise.PRICES,
}


def price(operator: MachineOperator, resources: Resources, roles: Roles = NO_ROLES) -> Cost:
    """Price an operator.

    Args:
        roles: what its operands are.
    """
    return _PRICES.get(operator.operator, elementwise.unknown)(operator, resources, roles)

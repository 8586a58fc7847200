"""Find the price of an operator by its name: the table from operators to classes of cost."""

from collections.abc import Mapping

from ipu_dynamo.machine.cost import NO_ROLES, Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import (
    convolutions,
    copies,
    elementwise,
    gathers,
    pooling,
    products,
    reductions,
)
from ipu_dynamo.machine.costs.arguments import NoArgumentsError
from ipu_dynamo.program.machine_operators import MachineOperator

# by the name of an operator, or by that of all its overloads
_PRICES: Mapping[str, Price] = {
    **products.PRICES,
    **convolutions.PRICES,
    **elementwise.PRICES,
    **reductions.PRICES,
    **gathers.PRICES,
    **copies.PRICES,
    **pooling.PRICES,
}


def price(operator: MachineOperator, resources: Resources, roles: Roles = NO_ROLES) -> Cost:
    """Price an operator; one without a formula is priced as a slow pass over its results.

    Args:
        roles: what its operands are.
    """
    name = operator.operator
    formula = _PRICES.get(name) or _PRICES.get(name.rpartition(".")[0], elementwise.unknown)
    try:
        return formula(operator, resources, roles)
    except NoArgumentsError:
        return elementwise.unknown(operator, resources, roles)

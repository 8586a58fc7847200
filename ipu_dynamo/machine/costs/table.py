"""Find the price of an operator by its name: the table from operators to classes of cost.

Loops and branches run operators, so their prices are here, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from ipu_dynamo.machine.cost import NO_ROLES, Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import (
    attention,
    basics,
    convolutions,
    copies,
    elementwise,
    gathers,
    pooling,
    products,
    recurrent,
    reductions,
    serialized_losses,
)
from ipu_dynamo.machine.costs.arguments import NoArgumentsError, arguments
from ipu_dynamo.program.machine_operators import MachineOperator

_ASSUMED_ROUNDS = 10  # of a loop whose rounds depend on values


def price(operator: MachineOperator, resources: Resources, roles: Roles = NO_ROLES) -> Cost:
    """Price an operator; one without a formula is priced as a slow pass over its results.

    Args:
        roles: those of its operands.
    """
    name = operator.operator
    formula = _PRICES.get(name) or _PRICES.get(name.rpartition(".")[0], elementwise.unknown)
    try:
        return formula(operator, resources, roles)
    except NoArgumentsError:
        return elementwise.unknown(operator, resources, roles)


def _bodies(operator: MachineOperator, resources: Resources, roles: Roles) -> list[Cost]:
    """The cost of one run of each body."""
    known = roles.bodies or tuple((NO_ROLES,) * len(body) for body in operator.bodies)
    costs = []
    for body, of_body in zip(operator.bodies, known, strict=True):
        parts = tuple(
            (each, price(each, resources, role)) for each, role in zip(body, of_body, strict=True)
        )
        whole = sum((cost for _, cost in parts), Cost())
        costs.append(replace(whole, plan=None, exchanges=(), in_place=False, parts=parts))
    return costs


def _loop(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of a loop with a number of rounds."""
    rounds = int(arguments(operator, roles)["count"])
    sync = _sync(resources)
    return sum(_bodies(operator, resources, roles), sync) * rounds


def _while_loop(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of a loop whose rounds depend on values."""
    whole = sum(_bodies(operator, resources, roles), _sync(resources)) * _ASSUMED_ROUNDS
    warning = f"the rounds of a loop depend on values; it is priced as {_ASSUMED_ROUNDS} rounds"
    return replace(whole, warning=whole.warning or warning)


def _branch(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of the dearer of two bodies; the machine has the code of both."""
    bodies = _bodies(operator, resources, roles)
    dearer = max(bodies, key=lambda body: body.cycles)
    return replace(
        dearer,
        temporary=max(body.temporary for body in bodies),
        parts=tuple(chain.from_iterable(body.parts for body in bodies)),
    )


def _sync(resources: Resources) -> Cost:
    sync = resources.ipu.sync
    return Cost(overhead=float(sync), marks={"overhead": basics.worst(sync)})


def _nothing(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of an operator that only transfers, which is priced with the system's links."""
    return Cost()


# by the name of an operator, or by that of all its overloads
_PRICES: Mapping[str, Price] = {
    **products.PRICES,
    **convolutions.PRICES,
    **elementwise.PRICES,
    **reductions.PRICES,
    **gathers.PRICES,
    **copies.PRICES,
    **pooling.PRICES,
    **attention.PRICES,
    **recurrent.PRICES,
    **serialized_losses.PRICES,
    "ipu.loop.default": _loop,
    "ipu.while_loop.default": _while_loop,
    "ipu.branch.default": _branch,
    "ipu.all_gather.default": _nothing,
    "ipu.all_reduce.default": _nothing,
    "ipu.all_reduce_gradient.default": _nothing,
    "ipu.all_to_all.default": _nothing,
    "ipu.print_tensor.default": _nothing,
    "ipu.replica_index.default": _nothing,
    "ipu.mix_key.default": _nothing,
}

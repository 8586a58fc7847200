"""Read the arguments of an operator by the names of its schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from ipu_dynamo.machine.cost import Roles
from ipu_dynamo.ops.operators import operator_name
from ipu_dynamo.ops.private.graphs import OpOverload, schema_of
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator


class NoArgumentsError(Exception):
    """A formula needs arguments that a node does not have, as it stands for another operator."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator reads.

    Args:
        is_weight: it is a variable of the program.
        from_host: the host sent it for this operator alone.
    """

    type: TensorType
    is_weight: bool = False
    from_host: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape


def operands(operator: MachineOperator, roles: Roles) -> tuple[Operand, ...]:
    """The tensors that an operator reads, each once."""
    return tuple(
        Operand(type_, place in roles.weights, place in roles.from_host)
        for place, type_ in enumerate(operator.operands)
    )


def arguments(operator: MachineOperator, roles: Roles) -> Mapping[str, Any]:
    """The arguments by name, with defaults; tensors are an `Operand`, or None on the machine.

    Raises:
        NoArgumentsError: the node calls another operator than the machine runs.
    """
    node = operator.node
    if node is None or operator_name(node.target) != operator.operator:
        raise NoArgumentsError(operator.operator)
    assert isinstance(node.target, OpOverload)
    read = operands(operator, roles)

    def value(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        place = operator.places.get(argument)
        return None if place is None else read[place]

    schema = schema_of(node.target).arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False))
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {
        name: map_aggregate(each, value) for name, each in (defaults | given | node.kwargs).items()
    }

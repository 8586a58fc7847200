"""Ask what one operator would cost on an IPU, without a program."""

from collections.abc import Sequence
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.machine.call_costs import Argument, price_call
from ipu_dynamo.machine.cost import Cost, Resources
from ipu_dynamo.machine.ipu import Ipu
from ipu_dynamo.machine.system import System, system_of
from ipu_dynamo.ops.operators import check_arguments, operator_named
from ipu_dynamo.ops.private.graphs import FakeTensorMode, module_of
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineGraph, MachineOperator


def operator_cost(
    name: str,
    types: Sequence[Any],
    machine: str | Ipu | System = "bow",
    *,
    partials: Literal["float", "half"] = "float",
    proportion: float = 0.6,
    in_place: bool = False,
) -> Cost:
    """Price one operator on one IPU.

        operator_cost("aten.mm.default", ["f16[1024,1024]", "f16[1024,4096]"], "bow")

    Operands are results of other operators, so none is a weight. The column `relayout` is the extra
    cost of a product whose operands have another layout than it reads.

    Args:
        name: with the overload, as programs print it.
        types: the operator's arguments in order. A tensor is given by its type, such as
            `f16[8,64]`, and other arguments as they are.
        machine: a name such as `mk2` or `bow-pod16`, an `Ipu` or a `System`.
        partials: in which the sums of products of halves are kept.
        proportion: the share of a tile's memory that a product may use for temporary values.
        in_place: the result may take the memory of an operand of its size.

    Raises:
        OptionError: the name of the machine is unknown.
        ValueError: the operator is unknown, or does not take these arguments.
    """
    operators = one_operator(name, types)
    resources = Resources(system_of(machine).ipu, proportion, partials=partials)
    count = sum(len(operator.operands) for operator in operators)
    costs = price_call(operators, [Argument(dies=in_place)] * count, resources)
    return sum(costs, Cost())


def one_operator(name: str, types: Sequence[Any]) -> tuple[MachineOperator, ...]:
    """The operators that the machine runs for one call: one, or none for a view."""
    target, graph = operator_named(name), fx.Graph()
    mode = FakeTensorMode()

    def argument(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [argument(item) for item in value]
        type_ = _type_of(value)
        if type_ is None:
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        with mode:
            node.meta["val"] = torch.empty(type_.shape, dtype=type_.dtype)
        return node

    arguments = tuple(map(argument, types))
    check_arguments(target, arguments, {})
    node = graph.call_function(target, arguments)
    values = map_arg(arguments, lambda n: n.meta["val"])
    try:
        with mode:
            node.meta["val"] = made = target(*values)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} does not take {list(types)}: {reason}") from error
    if isinstance(made, Tensor):
        graph.output((node,))
    else:
        graph.output(tuple(_parts(graph, node)))
    return MachineGraph(module_of(graph)).listed("forward")


def _type_of(value: Any) -> TensorType | None:
    """The type that an argument states; None: it is no tensor."""
    if isinstance(value, TensorType):
        return value
    if not isinstance(value, str) or "[" not in value:
        return None
    return TensorType.parse(value)


def _parts(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The tensors among several results."""
    parts = []
    for place, value in enumerate(node.meta["val"]):
        if isinstance(value, Tensor):
            parts.append(graph.call_function(getitem, (node, place)))
            parts[-1].meta["val"] = value
    return parts

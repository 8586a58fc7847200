"""Price the arithmetic that instructions describe: writes, clipping and updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Any

import torch

from ipu_dynamo.machine.call_costs import Argument, price_call
from ipu_dynamo.machine.cost import Cost, Resources
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.program.ir.base_instruction import Computed
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_rules import Rule
from ipu_dynamo.program.machine_operators import MachineGraph, MachineOperator

_IN_PLACE = Figure(1, "cycles/vector", "M", "arithmetic of two operands, in place")
_COPY = Figure(1, "cycles/vector", "M", "a cast or a copy")
_MEAN = Figure(2, "cycles/vector", "M", "arithmetic of three operands, in place")
_CLAMP = Figure(2, "cycles/vector", "M", "a limit on each side, in place")
_PASS = Figure(2, "cycles/vector", "M", "arithmetic, out of place")
_PER_VECTOR: Mapping[str, Figure] = {
    "store": _COPY,
    "+=": _IN_PLACE,
    "mean": _MEAN,
    "factor": _IN_PLACE,
    "clamp": _CLAMP,
}


def update_passes(rule: Rule) -> tuple[Figure, int] | None:
    """How often an update of a parameter goes over its elements, and over how many norms.

    None: the machine runs no update of this rule, or its own functions.
    """
    passes: Mapping[str, int] = {
        "sgd": 3 if "momentum" in rule.flags else 2,
        "rmsprop": 10 if "centered" in rule.flags else 8,
        "adam": 10,
        "lamb": 12,
    }
    if rule.kind not in passes:
        return None
    count = Figure(passes[rule.kind], "passes", "M", f"the equations of {rule.kind}")
    return count, 2 if rule.kind == "lamb" else 0


@dataclass(frozen=True)
class ComputedCosts:
    """The prices of arithmetic on one IPU.

    Args:
        functions: of traced updates, by name.
        type_of: the type of a value or variable, as a replica holds it there.
        shards: the number of shards of a gradient over replicas, by its name.
    """

    resources: Resources
    functions: Mapping[str, Function]
    type_of: Callable[[str], TensorType]
    shards: Mapping[str, int]

    def price(self, computed: Computed) -> Cost:
        """Price an instruction's arithmetic over one variable or value."""
        if computed.function is not None:
            return self._function(computed.function, self.shards.get(computed.over, 1))
        held = self.held(computed.over)
        elements = prod(held.shape)
        if computed.rule is not None:
            return self._update(elements, computed.rule)
        if computed.does == "norm":
            return basics.reduce(elements, 1, held.dtype, self.resources)
        per_vector = _PER_VECTOR[computed.does]
        return basics.elementwise(elements, held.dtype, per_vector, self.resources)

    def held(self, name: str) -> TensorType:
        """The type of the tensor that a replica computes with: the whole one, or its shard."""
        type_, shards = self.type_of(name), self.shards.get(name, 1)
        return type_.shard(shards) if shards > 1 else type_

    def _update(self, elements: int, rule: Rule) -> Cost:
        """Passes in float32, with the overhead of one operator."""
        needed = update_passes(rule)
        if needed is None:
            return Cost()  # the host does it
        passes, norms = needed
        one = basics.vectors(elements, torch.float32, _PASS, self.resources)
        cost = one * float(passes) + basics.run(self.resources)
        for _ in range(norms):
            cost += basics.reduce(elements, 1, torch.float32, self.resources)
        return cost

    def _function(self, name: str, shards: int) -> Cost:
        """Price the operators of a traced update, over a shard of their tensors."""
        operators, inputs = self._listed[name]
        parts = [_part(operator, shards) for operator in operators]
        costs = price_call(parts, [Argument()] * inputs, self.resources)
        return sum(costs, Cost())

    @cached_property
    def _listed(self) -> Mapping[str, tuple[Sequence[MachineOperator], int]]:
        return {
            name: (MachineGraph(function.graph).listed("backward"), len(function.inputs))
            for name, function in self.functions.items()
        }


def _part(operator: MachineOperator, shards: int) -> MachineOperator:
    """The operator on a shard: all but numbers have a part of their elements."""
    if shards == 1:
        return operator

    def part(type_: TensorType) -> TensorType:
        if not type_.shape:
            return type_
        first, *rest = type_.shape
        return TensorType(type_.dtype, (ceil(first / shards), *rest))

    changed: dict[str, Any] = {
        "operands": tuple(map(part, operator.operands)),
        "results": tuple(map(part, operator.results)),
    }
    return replace(operator, **changed)

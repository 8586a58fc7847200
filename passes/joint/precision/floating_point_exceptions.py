"""Stop the run at invalid operations, divisions by zero or infinity, overflows, tests of nan.

With     enabled=True
Before   %y = aten.log(%x: f32[n])
After    %y = aten.log(%x)
         ipu.check_floating_point(%y, [%x], [], "elementwise", "%y = aten.log.default")
Keeps    the graph and its values, as long as nothing raises. Views, memory without a value, and
         operators that read no tensor are not checked.
Source   PopTorch user guide, "poptorch.options._PrecisionOptions.enableFloatingPointExceptions".
"""

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import UNFILLED, is_view
from ipu_dynamo.ops.precision.float_check import Kind, check
from ipu_dynamo.ops.private.graphs import OpOverload, pytree
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.kit import GraphPass

_DIVISIONS: dict[object, Kind] = {
    aten.div.Tensor: "division",
    aten.div.Tensor_mode: "division",
    aten.div.Scalar: "division",
    aten.fmod.Tensor: "remainder",
    aten.remainder.Tensor: "remainder",
}
_COMPARISONS = {
    overload
    for packet in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
    for overload in (packet.Tensor, packet.Scalar)
}
_TESTS = {aten.isnan.default, aten.isinf.default, aten.nan_to_num.default}
_COPIES = {aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor}


@dataclass(frozen=True, slots=True)
class _Check:
    """A check of a value: the inputs of its operator, and how to compare."""

    value: fx.Node
    operands: tuple[fx.Node, ...]
    numbers: tuple[float, ...]
    kind: Kind

    @property
    def operator(self) -> str:
        """How the error names it."""
        source = self.value.args[0] if self.value.target is getitem else self.value
        return f"%{self.value.name} = {getattr(source, 'target', source)}"


class FloatingPointExceptions(GraphPass):
    """The pass. `enabled`: whether to check at all."""

    level = "joint"

    enabled: bool

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return self.enabled

    def plan(self, graph: fx.Graph) -> list[_Check]:
        """A check for every floating-point value that is computed. Reads the graph only."""
        if not self.enabled:
            return []
        checked = {node.args[0] for node in graph.nodes if node.target is check}
        checks = []
        for node in graph.nodes:
            source = node.args[0] if node.target is getitem else node
            if not isinstance(source.target, OpOverload) or node in checked:
                continue
            if is_view(node) or source.target in _TESTS | UNFILLED or source.target is check:
                continue
            kind = _kind(source)
            read = source.args[:2] if kind in _DIVISIONS.values() else source.all_input_nodes
            operands = tuple(n for n in read if isinstance(n, fx.Node) and _floats(n))
            if operands and (_floats(node) or kind == "comparison"):
                checks.append(_Check(node, operands, _numbers(source), kind))
        return checks

    def apply(self, graph: fx.Graph, planned: _Check) -> None:
        arguments = (list(planned.operands), list(planned.numbers), planned.kind, planned.operator)
        with graph.inserting_after(planned.value):
            call(graph, check, planned.value, *arguments, origin=planned.value)


def _kind(node: fx.Node) -> Kind:
    target = node.target
    assert isinstance(target, OpOverload)
    if target in _COMPARISONS:
        return "comparison"
    if target in _DIVISIONS and all(_floats(operand) for operand in node.all_input_nodes):
        return _DIVISIONS[target]
    if target is aten.reciprocal.default:
        return "reciprocal"
    pointwise = torch.Tag.pointwise in target.tags or target is aten._to_copy.default
    return "elementwise" if pointwise and target not in _COPIES else "whole"


def _numbers(node: fx.Node) -> tuple[float, ...]:
    """Return the Python numbers in place of elements; sizes and indices among them are harmless."""
    leaves: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
    return tuple(float(leaf) for leaf in leaves if isinstance(leaf, int | float))


def _floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()

"""Price attention as its parts: product, scale, mask, softmax, dropout and product.

PyTorch has an operator for each kind of device. The machine had none, so that all of them cost the
same. The backward pass computes the probabilities again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics, elementwise
from ipu_dynamo.machine.costs.arguments import Operand, arguments
from ipu_dynamo.machine.costs.products import matmul, proportion_of
from ipu_dynamo.machine.costs.reductions import softmax, softmax_backward
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator

_BMM = "aten.bmm.default"


@dataclass
class _Attention:
    """The parts of one attention.

    Shapes: `query [groups, rows, size]`, `key [groups, columns, size]`,
    `value [groups, columns, width]`; scores are `[groups, rows, columns]`.
    """

    parts: basics.PartCosts
    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    is_causal: bool
    drops: bool
    resources: Resources
    proportion: float

    @classmethod
    def of(cls, operator: MachineOperator, resources: Resources, roles: Roles) -> "_Attention":
        values = arguments(operator, roles)
        groups = prod(values["query"].shape[:-2])
        query, key, value = (_grouped(values[name], groups) for name in ("query", "key", "value"))
        return cls(
            basics.PartCosts(operator),
            query,
            key,
            value,
            values.get("attn_mask", values.get("attn_bias")),
            bool(values["is_causal"]),
            values["dropout_p"] > 0,
            resources,
            proportion_of(operator, resources),
        )

    @property
    def scores(self) -> Operand:
        groups, rows, _ = self.query.shape
        shape = (groups, rows, self.key.shape[1])
        return Operand(TensorType(self.query.type.dtype, shape))

    def product(self, a: Operand, b: Operand) -> None:
        partials = self.resources.partials
        cost = matmul(a, b, self.resources, self.proportion, partials)
        groups, rows, _ = a.shape
        result = TensorType(a.type.dtype, (groups, rows, b.shape[2]))
        self.parts.add(_BMM, (a.type, b.type), (result,), cost)

    def over_scores(
        self, name: str, speed: elementwise.Speed, other: Operand | None = None
    ) -> None:
        """Go over the scores in place."""
        scores, resources = self.scores.type, self.resources
        elements, width = basics.numel(scores), basics.vector_width(scores.dtype)
        cost = basics.elementwise(elements, scores.dtype, speed.of(width, True), resources)
        reads = [scores] if other is None else [scores, other.type]
        if other is not None and not other.is_weight and basics.numel(other.type) < elements:
            cost += basics.exchange(basics.machine_bytes(other.type), resources)
        cost += basics.touching(basics.machine_bytes(*reads, scores), resources)
        self.parts.add(name, reads, (scores,), cost)

    def probabilities(self) -> None:
        """Add the parts from queries and keys to probabilities, before dropout."""
        self.product(self.query, _transposed(self.key))
        self.over_scores("aten.mul.Scalar", elementwise.ARITHMETIC)
        if self.mask is not None and not self.mask.type.dtype.is_floating_point:
            self.over_scores("aten.masked_fill.Scalar", elementwise.SELECT, self.mask)
        elif self.mask is not None:
            self.over_scores("aten.add.Tensor", elementwise.ARITHMETIC, self.mask)
        if self.is_causal:
            self.over_scores("aten.add.Tensor", elementwise.ARITHMETIC)
        scores = self.scores.type
        rows = prod(scores.shape[:-1])
        cost = softmax(scores, rows, self.resources)
        self.parts.add("aten._softmax.default", (scores,), (scores,), cost)

    def dropout(self) -> None:
        if self.drops:
            self.over_scores("aten.native_dropout.default", elementwise.DROPOUT)

    def backward(self, gradient: Operand) -> None:
        """Add the parts from the gradient of the result to those of the operands."""
        self.product(_transposed(self.scores), gradient)
        self.product(gradient, _transposed(self.value))
        if self.drops:
            name = "aten.native_dropout_backward.default"
            self.over_scores(name, elementwise.DROPOUT_BACKWARD)
        scores = self.scores.type
        cost = softmax_backward(scores, prod(scores.shape[:-1]), self.resources)
        name = "aten._softmax_backward_data.default"
        self.parts.add(name, (scores, scores), (scores,), cost)
        self.over_scores("aten.mul.Scalar", elementwise.ARITHMETIC)
        self.product(self.scores, self.key)
        self.product(_transposed(self.scores), self.query)

    def cost(self, held: int) -> Cost:
        """The cost, with so many tensors of scores that exist at once."""
        between = held * basics.machine_bytes(self.scores.type)
        return self.parts.cost(between, self.resources.tiles)


def _grouped(operand: Operand, groups: int) -> Operand:
    """`[..., rows, columns]` as groups of matrices; fewer groups are repeated."""
    shape = (groups, *operand.shape[-2:])
    return Operand(TensorType(operand.type.dtype, shape), operand.is_weight, operand.from_host)


def _transposed(operand: Operand) -> Operand:
    groups, rows, columns = operand.shape
    type_ = TensorType(operand.type.dtype, (groups, columns, rows))
    return Operand(type_, operand.is_weight, operand.from_host)


def _forward(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    attention = _Attention.of(operator, resources, roles)
    attention.probabilities()
    attention.dropout()
    attention.product(attention.scores, attention.value)
    return attention.cost(held=1)


def _backward(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    values: Mapping[str, Any] = arguments(operator, roles)
    gradient = values.get("grad_out", values.get("grad_out_"))
    attention = _Attention.of(operator, resources, roles)
    attention.probabilities()
    attention.dropout()
    attention.backward(_grouped(gradient, attention.query.shape[0]))
    return attention.cost(held=2)


_KINDS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
PRICES: Mapping[str, Price] = {  # by the name without the overload
    **{f"aten.{name}": _forward for name in _KINDS},
    **{f"aten.{name}_backward": _backward for name in _KINDS},
    "aten._scaled_dot_product_attention_math": _forward,
    "aten.scaled_dot_product_attention": _forward,
}

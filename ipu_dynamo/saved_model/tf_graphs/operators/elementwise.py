"""Compute elementwise operators, and the arithmetic of sizes."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipu_dynamo.saved_model.tf_graphs.dtypes import torch_dtype
from ipu_dynamo.saved_model.tf_graphs.operators.registry import Call, HostInts, operator
from ipu_dynamo.saved_model.tf_graphs.operators.sizes import larger, smaller

_INTEGERS = (torch.int32, torch.int64)


def _binary(*names: str, host: Callable[[Any, Any], Any] | None = None) -> Any:
    """Register a function of two tensors; `host` computes sizes, where all inputs are sizes."""

    def register(function: Callable[[Tensor, Tensor], Tensor]) -> Any:
        def compute(call: Call) -> Any:
            a, b = call.values
            if host and isinstance(a, HostInts) and isinstance(b, HostInts):
                return _on_sizes(host, a, b)
            return function(call.tensor(0), call.tensor(1))

        operator(*names)(compute)
        return function

    return register


def _on_sizes(host: Callable[[Any, Any], Any], a: HostInts, b: HostInts) -> HostInts:
    if a.is_scalar and b.is_scalar:
        return HostInts(host(a.values, b.values), a.dtype)
    left, right = a.as_list(), b.as_list()
    count = max(len(left), len(right)) if left and right else 0
    left = left * count if len(left) == 1 else left
    right = right * count if len(right) == 1 else right
    return HostInts([host(x, y) for x, y in zip(left, right, strict=True)], a.dtype)


def _truncated(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


def _floored(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


_binary("Add", "AddV2", host=lambda a, b: a + b)(torch.add)
_binary("Sub", host=lambda a, b: a - b)(torch.sub)
_binary("Mul", host=lambda a, b: a * b)(torch.mul)
_binary("FloorDiv", host=lambda a, b: a // b)(_floored)
_binary("FloorMod", host=lambda a, b: a % b)(torch.remainder)
_binary("Maximum", host=larger)(torch.maximum)
_binary("Minimum", host=smaller)(torch.minimum)
_binary("RealDiv")(torch.true_divide)
_binary("Div")(_truncated)
_binary("Pow")(torch.pow)
_binary("SquaredDifference")(lambda a, b: (a - b) * (a - b))
_binary("Equal")(torch.eq)
_binary("NotEqual")(torch.ne)
_binary("Less")(torch.lt)
_binary("LessEqual")(torch.le)
_binary("Greater")(torch.gt)
_binary("GreaterEqual")(torch.ge)
_binary("LogicalAnd")(torch.logical_and)
_binary("LogicalOr")(torch.logical_or)


def _unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    operator(name)(lambda call: function(call.tensor(0)))


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Square": lambda x: x * x,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Log": torch.log,
    "Log1p": torch.log1p,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Tanh": torch.tanh,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Sigmoid": torch.sigmoid,
    "Reciprocal": torch.reciprocal,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sign": torch.sign,
    "LogicalNot": torch.logical_not,
    "Relu": torch.relu,
    "Relu6": F.relu6,
    "Elu": F.elu,
    "Selu": F.selu,
    "Softplus": F.softplus,
    "Softmax": lambda x: torch.softmax(x, -1),
    "LogSoftmax": lambda x: torch.log_softmax(x, -1),
}
for _name, _function in _UNARY.items():
    _unary(_name, _function)


@operator("Neg")
def neg(call: Call) -> Any:
    value = call.values[0]
    if isinstance(value, HostInts):
        parts = [-part for part in value.as_list()]
        return HostInts(parts[0] if value.is_scalar else parts, value.dtype)
    return -value


@operator("LeakyRelu")
def leaky_relu(call: Call) -> Tensor:
    return F.leaky_relu(call.tensor(0), call.attr("alpha", 0.2))


@operator("AddN")
def add_n(call: Call) -> Tensor:
    return reduce(torch.add, call.tensors())


@operator("ClipByValue")
def clip_by_value(call: Call) -> Tensor:
    return torch.minimum(torch.maximum(call.tensor(0), call.tensor(1)), call.tensor(2))


@operator("Cast")
def cast(call: Call) -> Any:
    value = call.values[0]
    dtype = torch_dtype(call.attr("DstT"), f"node {call.node.name!r}")
    if isinstance(value, HostInts) and dtype in _INTEGERS:
        return HostInts(value.values, dtype)
    return call.tensor(0).to(dtype)


@operator("Select")
def select(call: Call) -> Tensor:
    condition, a, b = call.tensors()
    if condition.dim() == 1 and a.dim() > 1:  # chooses rows
        condition = condition.reshape(-1, *[1] * (a.dim() - 1))
    return torch.where(condition, a, b)


@operator("SelectV2")
def select_v2(call: Call) -> Tensor:
    condition, a, b = call.tensors()
    return torch.where(condition, a, b)

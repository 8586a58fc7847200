"""Write in-place code as pure operators: each change of a tensor is a new value."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten

Call = Callable[..., Any]  # an operator and its arguments -> its result


class Value:
    """Stand for one tensor, or one number, while operators are written.

    Methods in place give it another `now`. No operand promotes the value that it changes: a float64
    number is cast, which would promote a tensor of no dimension.

    Args:
        call: writes an operator into a graph, or runs it.
        now: a node of the graph, with a fake value as `meta["val"]`; or a tensor.
    """

    def __init__(self, call: Call, now: Any) -> None:
        self._call, self.now = call, now

    @property
    def fake(self) -> Tensor:
        """A tensor of its dtype and shape."""
        return _tensor(self.now)

    @property
    def dtype(self) -> torch.dtype:
        return self.fake.dtype

    # --- In place

    def neg_(self) -> None:
        self.now = self._call(aten.neg.default, self.now)

    def sqrt_(self) -> None:
        self.now = self._call(aten.sqrt.default, self.now)

    def copy_(self, other: Self) -> None:
        self.now = other.now

    def fill_(self, number: float) -> None:
        self.now = self._call(aten.full_like.default, self.now, number)

    def clamp_(self, *, min: Self) -> None:
        self.now = self._call(aten.maximum.default, self.now, min.now)

    def mul_(self, other: Self | float) -> None:
        self.now = self._times(self.now, other)

    def div_(self, other: Self) -> None:
        self.now = self._call(aten.div.Tensor, self.now, self._fitting(self.now, other.now))

    def add_(self, other: Self | float, alpha: Self | float = 1.0) -> None:
        if isinstance(other, Value):
            self._add(aten.add.Tensor, self._times(other.now, alpha))
        else:
            self.now = self._call(aten.add.Scalar, self.now, other)

    def sub_(self, other: Self, alpha: Self | float = 1.0) -> None:
        self._add(aten.sub.Tensor, self._times(other.now, alpha))

    def addcmul_(self, a: Self, b: Self, value: Self | float = 1.0) -> None:
        product = self._call(aten.mul.Tensor, a.now, b.now)
        self._add(aten.add.Tensor, self._times(product, value))

    def addcdiv_(self, a: Self, b: Self, value: Self | float = 1.0) -> None:
        quotient = self._call(aten.div.Tensor, a.now, b.now)
        self._add(aten.add.Tensor, self._times(quotient, value))

    def lerp_(self, other: Self, weight: Self) -> None:
        change = self._call(aten.sub.Tensor, other.now, self.now)
        self._add(aten.add.Tensor, self._times(change, weight))

    # --- New values

    def clone(self) -> "Value":
        return Value(self._call, self.now)

    def sqrt(self) -> "Value":
        return self._new(aten.sqrt.default, self.now)

    def double(self) -> "Value":
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> "Value":
        return self if self.dtype == dtype else self._new(aten.to.dtype, self.now, dtype)

    def eq(self, number: float) -> "Value":
        return self._new(aten.eq.Scalar, self.now, number)

    def logical_or(self, other: Self) -> "Value":
        return self._new(aten.logical_or.default, self.now, other.now)

    def where(self, condition: Self, other: Self) -> "Value":
        return self._new(aten.where.self, condition.now, self.now, other.now)

    def masked_fill(self, mask: Self, number: float) -> "Value":
        return self._new(aten.masked_fill.Scalar, self.now, mask.now, number)

    def clamp(self, *, max: Self) -> "Value":
        return self._new(aten.minimum.default, self.now, max.to(self.dtype).now)

    def norm(self, dtype: torch.dtype) -> "Value":
        """The 2-norm, computed in `dtype`."""
        return self._new(aten.linalg_vector_norm.default, self.to(dtype).now)

    def as_strided(self, size: tuple[int, ...], stride: tuple[int, ...]) -> "Value":
        return self._new(aten.as_strided.default, self.now, [*size], [*stride])

    def __add__(self, other: Self) -> "Value":
        return self._new(aten.add.Tensor, self.now, self._fitting(self.now, other.now))

    def __mul__(self, other: Self) -> "Value":
        return Value(self._call, self._times(self.now, other))

    def __truediv__(self, other: Self) -> "Value":
        return self._new(aten.div.Tensor, self.now, self._fitting(self.now, other.now))

    def __pow__(self, other: Self) -> "Value":
        return self._new(aten.pow.Tensor_Tensor, self.now, other.now)

    def __rsub__(self, number: float) -> "Value":
        return self._new(aten.rsub.Scalar, self.now, number)

    def __neg__(self) -> "Value":
        return self._new(aten.neg.default, self.now)

    def _new(self, operator: Any, *args: Any) -> "Value":
        return Value(self._call, self._call(operator, *args))

    def _add(self, operator: Any, term: Any) -> None:
        self.now = self._call(operator, self.now, self._fitting(self.now, term))

    def _times(self, a: Any, factor: "Value | float") -> Any:
        """`a` times a factor, in the dtype of `a`."""
        if isinstance(factor, Value):
            return self._call(aten.mul.Tensor, a, self._fitting(a, factor.now))
        return a if factor == 1.0 else self._call(aten.mul.Scalar, a, factor)

    def _fitting(self, a: Any, b: Any) -> Any:
        """`b`, cast if it would promote `a`."""
        dtype = _tensor(a).dtype
        if torch.result_type(_tensor(a), _tensor(b)) == dtype:
            return b
        return self._call(aten.to.dtype, b, dtype)


def _tensor(value: Any) -> Tensor:
    """A tensor, or the fake one of a node."""
    tensor: Tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    return tensor

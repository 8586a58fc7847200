"""Find the function that computes an operator, and hand it its arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.flatten import TfNode

Function = Callable[["Call"], Any]
PAIRS = "ipu.pairs"  # key of a constant's attributes: its rows as integers
_functions: dict[str, Function] = {}


@dataclass(frozen=True, slots=True)
class HostInts:
    """Integers that Python knows while the program is made: a scalar, or a list.

    Attributes:
        values: an int or SymInt, or a list of these.
        dtype: that of a tensor of them.
        constant: makes the tensor, where the graph has it as a constant.
    """

    values: Any
    dtype: torch.dtype
    constant: Callable[[], Tensor] | None = None

    @property
    def is_scalar(self) -> bool:
        return not isinstance(self.values, list)

    def as_list(self) -> list[Any]:
        return [self.values] if self.is_scalar else list(self.values)

    def tensor(self) -> Tensor:
        """The integers as a tensor."""
        if self.constant is not None:
            return self.constant()
        parts = self.as_list()
        if all(isinstance(part, int) for part in parts):
            return torch.tensor(self.values, dtype=self.dtype)
        scalars = [torch.scalar_tensor(part, dtype=self.dtype) for part in parts]
        return scalars[0] if self.is_scalar else torch.stack(scalars)


@dataclass(frozen=True, slots=True)
class Call:
    """A node with the values of its inputs."""

    node: TfNode
    values: Sequence[Any]

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attributes.get(name, default)

    def tensor(self, index: int) -> Tensor:
        value = self.values[index]
        return value.tensor() if isinstance(value, HostInts) else value

    def tensors(self) -> list[Tensor]:
        return [self.tensor(index) for index in range(len(self.values))]

    def ints(self, index: int) -> list[Any]:
        """An input as integers that are known while the program is made.

        Raises:
            NotImplementedError: it is a tensor, whose values only a call knows.
        """
        value = self.values[index]
        if not isinstance(value, HostInts):
            raise NotImplementedError(
                f"node {self.node.name!r} ({self.node.op}) takes sizes from the values of a tensor"
            )
        return value.as_list()

    def integer(self, index: int) -> Any:
        (value,) = self.ints(index)
        return value

    def pairs(self, index: int) -> list[tuple[int, int]]:
        """An input as pairs of integers: a constant, since sizes are in lists of one dimension.

        Raises:
            NotImplementedError: it is computed.
        """
        source, _ = self.node.inputs[index]
        if PAIRS not in source.attributes:
            raise NotImplementedError(
                f"node {self.node.name!r} ({self.node.op}) takes sizes that are computed"
            )
        return [(before, behind) for before, behind in source.attributes[PAIRS]]

    def on_host(self) -> bool:
        """Whether all inputs are known integers."""
        return all(isinstance(value, HostInts) for value in self.values)


def operator(*names: str) -> Callable[[Function], Function]:
    """Register a function for operators of these names."""

    def register(function: Function) -> Function:
        for name in names:
            if name in _functions:
                raise ValueError(f"two functions for {name}")
            _functions[name] = function
        return function

    return register


def function_of(name: str) -> Function | None:
    """The function that computes an operator, if there is one."""
    return _functions.get(name)


def names() -> list[str]:
    """All operators that there are functions for, sorted."""
    return sorted(_functions)

"""Call a function of nested arguments as a function of the tensors among them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ipu_dynamo.capture.private.tracing import flatten, pytree

TENSOR = object()  # stands for a tensor in a result


class NestedCall:
    """A call that can be repeated with other tensors, in place of those among its arguments.

    Args:
        function: returns any structure of tensors and other values.
        args, kwargs: of the call.

    Attributes:
        tensors: those among the arguments.
        result: the values and the structure of the first result; None before.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._leaves, self._spec = flatten((tuple(args), dict(kwargs)))
        self._positions = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [self._leaves[i] for i in self._positions]
        self.result: tuple[list[Any], Any] | None = None  # of the first call

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function with other tensors; return those of its result."""
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        found, spec = flatten(self._function(*args, **kwargs))
        self.keep([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found], spec)
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def keep(self, leaves: list[Any], spec: Any) -> None:
        """Keep the result of the first call, with `TENSOR` in place of each of its tensors."""
        if self.result is None:
            self.result = leaves, spec

    def rebuilt(self, tensors: Iterable[Tensor]) -> Any:
        """The result of the first call, with other tensors."""
        assert self.result is not None, "it was not called yet"
        leaves, spec = self.result
        values = iter(tensors)
        return pytree.tree_unflatten(
            [next(values) if leaf is TENSOR else leaf for leaf in leaves], spec
        )

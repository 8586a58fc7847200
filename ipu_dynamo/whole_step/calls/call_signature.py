"""Compare a call's arguments with those that a program was compiled for, at little cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.private.tracing import flatten
from ipu_dynamo.capture.trace import Arguments
from ipu_dynamo.errors import InputError


class ExpectedArguments:
    """The structure, dtypes and Python values of the first call. Streams check the shapes.

    Attributes:
        first: its arguments, in which tensors tell their dtypes only.
    """

    def __init__(self, first: Arguments) -> None:
        leaves = tuple(
            _dtype_only(leaf) if isinstance(leaf, Tensor) else leaf for leaf in first.leaves
        )
        self.first = Arguments(leaves, first.spec, first.names)
        self._spec, self._names = first.spec, first.names
        self._dtypes = [x.dtype if isinstance(x, Tensor) else None for x in first.leaves]
        self._values = [None if isinstance(x, Tensor) else x for x in first.leaves]
        self._keywords = tuple(first.rebuild(first.tensors)[1])
        nested, keywords = first.spec.children()
        simple = not keywords.num_leaves and all(child.is_leaf() for child in nested.children())
        self._simple = len(first.leaves) if simple and None not in self._dtypes else None

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of the program's inputs.

        Raises:
            InputError: the call differs from the first one.
        """
        if self._simple == len(args) and not kwargs:
            leaves: list[Any] = list(args)
        else:
            leaves, spec = flatten((tuple(args), self._ordered(kwargs)))
            if spec != self._spec:
                raise InputError(
                    f"the arguments differ in structure from those that the program was compiled "
                    f"for: {', '.join(self._names)}",
                    hint="pass the same nesting and keys, or compile again",
                )
        for position, (leaf, dtype) in enumerate(zip(leaves, self._dtypes, strict=True)):
            if not (isinstance(leaf, Tensor) and leaf.dtype == dtype):
                self._compare(position, leaf)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _ordered(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments in the order of the first call, when they have the same names."""
        if kwargs.keys() == set(self._keywords):
            return {name: kwargs[name] for name in self._keywords}
        return dict(kwargs)

    def _compare(self, position: int, new: Any) -> None:
        """Accept an equal Python value."""
        name, dtype, value = self._names[position], self._dtypes[position], self._values[position]
        if isinstance(new, Tensor) != (dtype is not None):
            expected = torch.Tensor if dtype is not None else type(value)
            raise InputError(
                f"Type mismatch for {name}: expected {expected} but got {type(new)}",
                hint="pass a tensor, as torch.as_tensor(value), or compile again for this call"
                if dtype is not None
                else "compile again for this call",
            )
        if isinstance(new, Tensor):
            raise InputError(
                f"Data type mismatch for {name}: expected {dtype} but got {new.dtype}",
                hint="convert the tensor, or compile again for this type",
            )
        if new is not value and (type(new) is not type(value) or new != value):
            raise InputError(
                f"Value mismatch for {name}: expected {value!r} but got {new!r}",
                hint="Python values are part of the program: compile again, or pass a tensor",
            )


def _dtype_only(tensor: Tensor) -> Tensor:
    return torch.empty((), dtype=tensor.dtype, device="meta")

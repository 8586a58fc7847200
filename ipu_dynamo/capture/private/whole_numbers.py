"""Take an optimiser's whole numbers by their value where an operator cannot have a symbol.

Sizes are such numbers, and limits of counts (`rank`, `k`). The value then is a condition of the
trace, as for a decision in Python. Checked on PyTorch 2.13.0.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_dynamo.capture.private.update_symbols import free_symbols, symbol_of

# Functions that take a size, or parts of one, without a list around them.
_OF_SIZES = {
    "chunk", "empty", "expand", "eye", "narrow", "new_empty", "new_ones", "new_zeros", "ones",
    "permute", "rand", "randn", "repeat", "reshape", "split", "topk", "tril", "triu", "unflatten",
    "view", "zeros",
}  # fmt: skip
_OF_LISTS = "_foreach_"  # whose lists hold tensors, or numbers for each
_OF_VALUES = ("tensor", "as_tensor")  # whose lists are values
Take = Callable[[Any], Any]


class SizesOfFunctions(TorchFunctionMode):
    """While entered, sizes that Python gives to functions are numbers: some functions of PyTorch
    take no symbols.

    Args:
        symbols: of the numbers that may be taken by their value.
    """

    def __init__(self, symbols: Collection[str]) -> None:
        super().__init__()
        self._taken = _by_value(symbols)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name.startswith(_OF_LISTS) or name in _OF_VALUES:
            return func(*args, **kwargs)
        taken = self._taken if name in _OF_SIZES else _within_lists(self._taken)
        return func(*map(taken, args), **{key: taken(value) for key, value in kwargs.items()})


class SizesOfOperators(TorchDispatchMode):
    """While entered, operators take whole numbers as such.

    Args:
        symbols: of the numbers that may be taken by their value.
        kept: names of the operators that may have symbols, outside of lists.
    """

    def __init__(self, symbols: Collection[str], kept: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken, self._kept = _by_value(symbols), kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name.startswith(_OF_LISTS):
            return func(*args, **kwargs)
        taken = _within_lists(self._taken) if name.rstrip("_") in self._kept else self._taken
        return func(*map(taken, args), **{key: taken(value) for key, value in kwargs.items()})


def _by_value(symbols: Collection[str]) -> Take:
    own = frozenset(symbols)

    def number(value: torch.SymInt) -> Any:
        return int(value) if free_symbols(symbol_of(value)) <= own else value

    def taken(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(taken(value.start), taken(value.stop), taken(value.step))
        if isinstance(value, list | tuple):
            return type(value)(map(taken, value)) if not hasattr(value, "_fields") else value
        return number(value) if isinstance(value, torch.SymInt) else value

    return taken


def _within_lists(taken: Take) -> Take:
    return lambda value: taken(value) if isinstance(value, list | tuple | slice) else value

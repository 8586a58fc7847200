"""Offer the functions that programs call as `torch.ops.poptorch`: scopes, attributes, casts.

They are functions of Python, no operators of PyTorch's dispatcher: graphs have their operators, not
the call. Programs use them, and not poptorch's own names, in hooks and in torch.fx graphs.
"""

import threading
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from poptorch.errors import createPoptorchError

if TYPE_CHECKING:
    from poptorch.annotations import NameScope

_DTYPES = MappingProxyType(
    {
        "FLOAT": torch.float32,
        "FLOAT16": torch.float16,
        "INT32": torch.int32,
        "INT16": torch.int16,
        "INT8": torch.int8,
        "UINT8": torch.uint8,
        "BOOL": torch.bool,
    }
)


class _Open(threading.local):
    """The scopes that this thread has opened and not closed, and the trace that they are in."""

    def __init__(self) -> None:
        self.scopes: list[NameScope] = []
        self.graph: object = None


_open = _Open()


def push_name_scope(name: str) -> None:
    """Put `name/` before the names of the operators that follow, until `pop_name_scope`."""
    # here: importing what traces takes a second, which processes that only load data spare
    from ipu_dynamo.capture.private.tracing import graph_being_traced
    from poptorch.annotations import NameScope

    if (graph := graph_being_traced()) is not _open.graph:
        _close_all()  # an error has ended the last trace
        _open.graph = graph
    scope = NameScope(name)
    scope.__enter__()
    _open.scopes.append(scope)


def pop_name_scope() -> None:
    """End the scope that was opened last; nothing if none is open."""
    if _open.scopes:
        _open.scopes.pop().__exit__(None, None, None)


def _close_all() -> None:
    while _open.scopes:
        pop_name_scope()


def set_attribute(attribute: str, key: str, value: str) -> None:
    """Give the operators that follow an attribute of strings; recorded only, as `Attribute` is."""


def clear_attribute(attribute: str, key: str) -> None:
    """End what `set_attribute` began."""


def internal_cast(tensor: Tensor, dtype: str) -> Tensor:
    """A tensor in the type that PopART calls `dtype`, such as "FLOAT16"; differentiable."""
    if dtype not in _DTYPES:
        raise createPoptorchError(
            f"internal_cast to {dtype!r}: choose from {', '.join(_DTYPES)}", id="operator"
        )
    return tensor.to(_DTYPES[dtype])


def offer() -> None:
    """Make `torch.ops.poptorch` have these functions."""
    for function in (
        push_name_scope,
        pop_name_scope,
        set_attribute,
        clear_attribute,
        internal_cast,
    ):
        setattr(torch.ops.poptorch, function.__name__, function)

"""Offer what PopTorch programs and libraries reach through `poptorch._impl`."""

from typing import TypeVar

from torch import Tensor, nn

from poptorch.errors import createPoptorchError
from poptorch.executor import PoplarExecutor
from poptorch.tracing import isRunningOnIpu
from poptorch.wrapping import WrappedModule, WrappedTensor

_Object = TypeVar("_Object", nn.Module, Tensor)


def isDispatchTracing() -> bool:
    """Whether a model is being traced for an executor right now."""
    return isRunningOnIpu()


def isWrapped(obj: object) -> bool:
    """Whether a module, parameter or buffer has the class that training gives it."""
    return isinstance(obj, WrappedModule | WrappedTensor)


def unwrapIfWrapped(obj: _Object) -> _Object:
    """Give one object its own class back, but not those inside it; return the object."""
    if isinstance(obj, WrappedModule):
        obj.__class__ = obj._poptorch_plain  # type: ignore[assignment]
    elif isinstance(obj, WrappedTensor):
        obj.__class__ = obj._plain  # type: ignore[assignment]
    return obj


__all__ = [
    "PoplarExecutor",
    "createPoptorchError",
    "isDispatchTracing",
    "isRunningOnIpu",
    "isWrapped",
    "unwrapIfWrapped",
]

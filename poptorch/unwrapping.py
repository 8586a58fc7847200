"""Give wrapped modules, parameters and buffers their own classes back, and the wrappers later."""

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from poptorch.wrapping import WrappedModule, WrappedTensor

_Object = TypeVar("_Object", nn.Module, Tensor)

_wrappers = WeakIdKeyDictionary()  # which class each unwrapped object had


def is_wrapped(obj: object) -> bool:
    """Whether a module, parameter or buffer has the class that training gives it."""
    return isinstance(obj, WrappedModule | WrappedTensor)


def unwrap(obj: _Object) -> _Object:
    """Give one object its own class back, but not those inside it; return the object."""
    if isinstance(obj, WrappedModule):
        _wrappers[obj] = type(obj)
        obj.__class__ = obj._poptorch_plain  # type: ignore[assignment]
    elif isinstance(obj, WrappedTensor):
        _wrappers[obj] = type(obj)
        obj.__class__ = obj._plain  # type: ignore[assignment]
    return obj


def rewrap(obj: _Object) -> _Object:
    """Give one object the class back that `unwrap` took, if it did; return the object."""
    wrapper = _wrappers.pop(obj, None)
    if wrapper is not None and not is_wrapped(obj):
        obj.__class__ = wrapper
    return obj


def unwrap_model(model: Any) -> None:
    """Unwrap a module, its parameters and buffers; its executor goes on as before.

    Until `rewrap_model` no access fetches weights from the device.
    """
    if isinstance(model, nn.Module):
        for tensor in [*model.parameters(), *model.buffers()]:
            unwrap(tensor)
        unwrap(model)


def rewrap_model(model: Any) -> None:
    """Undo `unwrap_model`, for the parameters and buffers that the module has now."""
    if isinstance(model, nn.Module) and len(_wrappers):
        for tensor in [*model.parameters(), *model.buffers()]:
            rewrap(tensor)
        rewrap(model)

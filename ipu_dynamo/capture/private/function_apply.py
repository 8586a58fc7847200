"""Replace what `torch.autograd.Function.apply` does, also where a model took the method before.

PyTorch 2.13 has `apply` in Python, below the one that models see. In 2.14 it is a builtin, and a
model that took `steep = Steep.apply` holds that. It asks the class for `_backward_cls`, which
nobody else does, and then for `forward`, through the metaclass: there another forward is given.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd.function import Function, FunctionMeta
from torch.autograd.function import _SingleLevelFunction as FunctionBase

from ipu_dynamo.ops.private.replacing import replaced

_IS_PYTHON = isinstance(vars(Function)["apply"], classmethod)  # PyTorch 2.13


def apply_replaced(
    record: Callable[..., Any], *, unless: Callable[[], bool]
) -> AbstractContextManager[None]:
    """Let `cls.apply(...)` be `record(cls, ...)` in this thread, but while `unless()` holds."""
    thread = threading.local()
    thread.is_here = True

    def is_replaced() -> bool:
        return getattr(thread, "is_here", False) and not unless()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if is_replaced():
            return record(cls, *args, **kwargs)
        return super(FunctionBase, cls).apply(*args, **kwargs)

    def attribute(cls: Any, name: str) -> Any:
        applied: Any = getattr(thread, "applied", None)
        if name == "_backward_cls" and is_replaced():
            thread.applied = cls
        elif name == "forward" and applied is cls:
            del thread.applied
            takes_context = cls.setup_context is FunctionBase.setup_context
            return lambda *args: record(cls, *args[takes_context:])
        return type.__getattribute__(cls, name)

    if _IS_PYTHON:
        return replaced(FunctionBase, "apply", classmethod(apply))
    return replaced(FunctionMeta, "__getattribute__", attribute)

"""Replace what `torch.autograd.Function.apply` does, also where a model took the method before.

PyTorch 2.13 has `apply` in Python, below the one that models see. In 2.14 it is a builtin, and the
metaclass returns the recording function when a class's attribute `apply` is read. A model that took
`steep = Steep.apply` before holds the builtin. This reads the class's `_backward_cls`, as no other
code does, and then `forward`: the metaclass then returns a forward that records.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
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
        if name == "apply" and is_replaced() and not torch._C._are_functorch_transforms_active():
            return partial(record, cls)
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

"""Call the user's functions around every compilation."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

Hook = Callable[[], Any]
_before: "OrderedDict[int, Hook]" = OrderedDict()
_after: "OrderedDict[int, Hook]" = OrderedDict()


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Call a function before each compilation traces a model.

    Args:
        hook: takes no argument; its result is not read.

    Returns:
        A handle; its `remove()` removes the hook.
    """
    if not callable(hook):
        raise RuntimeError("Pre-compile hook must be callable")
    return _register(_before, hook)


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Call a function after each compilation, also after one that failed.

    Args:
        hook: takes no argument; its result is not read.

    Returns:
        A handle; its `remove()` removes the hook.
    """
    if not callable(hook):
        raise RuntimeError("Post-compile hook must be callable")
    return _register(_after, hook)


@contextmanager
def compile_hooks() -> Iterator[None]:
    """Call the registered functions, in the order of their registration."""
    for hook in list(_before.values()):
        hook()
    try:
        yield
    finally:
        for hook in list(_after.values()):
            hook()


def _register(hooks: "OrderedDict[int, Hook]", hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

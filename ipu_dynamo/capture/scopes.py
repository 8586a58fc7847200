"""Note, while a model is traced, in which module and named scope each operator is called."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import takewhile
from typing import Any

from torch import nn

from ipu_dynamo.capture.private.tracing import graph_being_traced
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

SCOPE = "ipu.scope"  # key of node.meta: names of modules and scopes, outermost first, by "/"

CALLER = "ipu.caller"  # key of node.meta: path and class of the innermost module that calls it

_scopes: ContextVar[tuple[str, ...]] = ContextVar("ipu_scopes", default=())


@contextmanager
def name_scope(name: str, caller: tuple[str, str] | None = None) -> Iterator[None]:
    """Put `name/` before the names of the operators that are traced inside; else do nothing.

    Args:
        caller: path and class of the module that calls them.
    """
    graph = graph_being_traced()
    if graph is None:
        yield
        return
    scopes = (*_scopes.get(), name)
    token, last = _scopes.set(scopes), next(reversed(graph.nodes), None)
    try:
        yield
    finally:
        _scopes.reset(token)
    text = "/".join(scopes)
    for node in takewhile(lambda node: node is not last, reversed(graph.nodes)):
        node.meta.setdefault(SCOPE, text)
        if caller is not None:
            node.meta.setdefault(CALLER, caller)


def module_scopes(model: object) -> AbstractContextManager[None]:
    """Make a scope of every call of a submodule, called as the model's attributes are."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    paths = {id(module): name.split(".") for name, module in named if name}
    call = in_this_thread(_within(paths, nn.Module.__call__), nn.Module.__call__)
    return replaced(nn.Module, "__call__", call)


def _within(paths: Mapping[int, list[str]], original: Callable[..., Any]) -> Callable[..., Any]:
    """Call a module in its scope: its path below that of the module that calls it."""
    outer: list[list[str]] = [[]]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        above = outer[-1]
        below = path[len(above) :] if path[: len(above)] == above else path
        outer.append(path)
        try:
            with name_scope("/".join(below), (".".join(path), type(module).__name__)):
                return original(module, *args, **kwargs)
        finally:
            outer.pop()

    return call

"""Install the hooks of scopes, and remove them with the last scope of any thread."""

import threading
from dataclasses import dataclass
from typing import Any

from ipu_dynamo.keras.attach.extended_classes import make_model
from ipu_dynamo.keras.attach.thread_state import THREAD, extensions_active, innermost_strategy
from ipu_dynamo.keras.private import default_backend
from ipu_dynamo.keras.private.keras_private import Model, Node, Operation, Sequential
from ipu_dynamo.keras.stages.pipeline_stage import mark_nodes, mark_operations
from ipu_dynamo.keras.stored.restore import restoring

_LOCK = threading.RLock()
_ABSENT = object()


def enter_scope(strategy: Any) -> None:
    """Begin a scope of this thread.

    Raises:
        RuntimeError: the thread is in the scope of another strategy.
    """
    present = innermost_strategy()
    if present is not None and present is not strategy:
        raise RuntimeError(
            f"cannot enter the scope of {strategy!r} inside that of {present!r}: "
            "leave that one first, or use one strategy for both"
        )
    _HOOKS.acquire()
    THREAD.strategies.append(strategy)


def leave_scope() -> None:
    """End the innermost scope of this thread."""
    THREAD.strategies.pop()
    _HOOKS.release()


@dataclass(frozen=True, slots=True)
class Patch:
    """An attribute that is replaced while scopes are open; `raw` is what stood there before."""

    owner: Any
    name: str
    raw: Any

    def undo(self) -> None:
        if self.raw is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)


class Hooks:
    """The replaced attributes of Keras and PyTorch.

    Invariant: they are in place exactly while the number of open scopes, over all threads, is
    positive. In threads without an open scope each calls the function that it replaced.
    """

    def __init__(self) -> None:
        self.scopes = 0
        self.patches: list[Patch] = []

    def acquire(self) -> None:
        with _LOCK:
            if not self.scopes:
                self._install()
            self.scopes += 1

    def release(self) -> None:
        with _LOCK:
            self.scopes -= 1
            if not self.scopes:
                while self.patches:
                    self.patches.pop().undo()

    def _install(self) -> None:
        original_new = Model.__new__
        original_backend = getattr(default_backend.registry, default_backend.NAME)

        def new_model(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not extensions_active():
                return original_new(cls, *args, **kwargs)
            return make_model(original_new, cls, args, kwargs)

        def get_default_backend() -> Any:
            return original_backend() if innermost_strategy() is None else "ipu"

        # Operation first: its constructor is what that of Model calls
        self._replace(Operation, "__new__", staticmethod(mark_operations(Operation.__new__)))
        self._replace(Model, "__new__", staticmethod(new_model))
        self._replace(Node, "__init__", mark_nodes(Node.__init__))
        for cls in (Model, Sequential):
            self._replace(cls, "from_config", classmethod(restoring(vars(cls)["from_config"])))
        self._replace(default_backend.registry, default_backend.NAME, get_default_backend)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self.patches.append(Patch(owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)


_HOOKS = Hooks()

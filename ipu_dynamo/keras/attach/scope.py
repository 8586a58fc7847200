"""Install the hooks of scopes, and remove them with the last scope of any thread."""

import threading
from dataclasses import dataclass
from typing import Any

from ipu_dynamo.keras.attach.extended_classes import make_model
from ipu_dynamo.keras.private import default_backend
from ipu_dynamo.keras.private.keras_private import Model

_LOCK = threading.RLock()
_THREAD = threading.local()
_ABSENT = object()


def innermost_strategy() -> Any:
    """The strategy whose scope this thread is in, or None."""
    strategies = getattr(_THREAD, "strategies", ())
    return strategies[-1] if strategies else None


def extensions_active() -> bool:
    """Whether this thread is in a scope whose strategy extends Keras models."""
    strategy = innermost_strategy()
    return strategy is not None and strategy.enable_keras_extensions


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
    _THREAD.strategies = [*getattr(_THREAD, "strategies", ()), strategy]


def leave_scope() -> None:
    """End the innermost scope of this thread."""
    _THREAD.strategies.pop()
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
    positive. Each asks in whose thread it runs, and elsewhere is what it replaced.
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

        self._replace(Model, "__new__", staticmethod(new_model))
        self._replace(default_backend.registry, default_backend.NAME, get_default_backend)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self.patches.append(Patch(owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)


_HOOKS = Hooks()

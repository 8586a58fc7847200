"""Say what each option does, for the guide and for whoever compiles.

Every setter carries its effect; `poptorch.options.table` collects them.
"""

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from poptorch._logging import logger


class Effect(StrEnum):
    """What an option changes."""

    COMPUTES = "computes"  # the computation or its results
    MACHINE = "machine"  # only the machine model: memory plan, cycles, schedule, profile
    RECORDED = "recorded"  # nothing: it is checked, kept and shown
    HOST = "host"  # the host: data loading, files, logging, wrapping


_MACHINE_MODEL = "the machine model"

# Options whose effect is still to come, with what each waits for. They are recorded until then, and
# say so once. An option leaves this table with the change that makes it work.
PENDING = {
    "TensorLocationSettings.useIOTilesToLoad": _MACHINE_MODEL,
    "TensorLocationSettings.useIOTilesToStore": _MACHINE_MODEL,
    "_Popart.defaultBufferingDepth": _MACHINE_MODEL,
    "_Popart.defaultPrefetchBufferingDepth": _MACHINE_MODEL,
    "_Popart.engineOptions": _MACHINE_MODEL,
    "_Popart.instrumentWithHardwareCycleCounter": _MACHINE_MODEL,
    "_Popart.setEngineOptions": _MACHINE_MODEL,
    "enableProfiling": _MACHINE_MODEL,
    "logCycleCount": _MACHINE_MODEL,
    "modelName": _MACHINE_MODEL,
    "setAvailableMemoryProportion": _MACHINE_MODEL,
    "syncPattern": _MACHINE_MODEL,
}


class Settable(Protocol):
    """What a setter is called on."""

    _PREFIX: ClassVar[str]  # how the object is reached from an `Options`, such as "Training."

    def checkIsFrozen(self) -> None:
        """Raise if nothing may change any more."""


_Owner = TypeVar("_Owner", bound=Settable)
_Arguments = ParamSpec("_Arguments")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_EFFECT = "__ipu_dynamo_effect__"


def _anything(*args: Any, **kwargs: Any) -> bool:
    return any(args) or any(kwargs.values())


def setter(
    effect: Effect, asks: Callable[..., bool] = _anything
) -> Callable[
    [Callable[Concatenate[_Owner, _Arguments], None]],
    Callable[Concatenate[_Owner, _Arguments], _Owner],
]:
    """Make a method a setter: it carries `effect`, refuses frozen options and can be chained.

    Args:
        asks: whether its arguments ask for something else than the default.
    """

    def decorate(
        method: Callable[Concatenate[_Owner, _Arguments], None],
    ) -> Callable[Concatenate[_Owner, _Arguments], _Owner]:
        @has_effect(effect)
        @functools.wraps(method)
        def call(owner: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Owner:
            owner.checkIsFrozen()
            method(owner, *args, **kwargs)
            if asks(*args, **kwargs):
                warn_if_pending(owner._PREFIX + method.__name__)
            return owner

        return call

    return decorate


def has_effect(effect: Effect) -> Callable[[_Method], _Method]:
    """Note the effect of a method that is no ordinary setter."""

    def decorate(method: _Method) -> _Method:
        setattr(method, _EFFECT, effect)
        return method

    return decorate


def effect_of(method: object) -> Effect | None:
    """The effect that a setter carries, None for any other method."""
    return getattr(method, _EFFECT, None)


_said: set[str] = set()  # the options that said so, in this process


def warn_if_pending(accessor: str) -> None:
    """Say once that an option has no effect yet."""
    waits_for = PENDING.get(accessor)
    if waits_for is not None and accessor not in _said:
        _said.add(accessor)
        logger.warning(
            "poptorch.Options.%s is recorded only: its effect waits for %s", accessor, waits_for
        )

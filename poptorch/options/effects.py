"""Name the effect of each option, for the guide and for the compiler.

Every setter carries its effect; `poptorch.options.table` collects them.
"""

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar


class Effect(StrEnum):
    """The part that an option changes."""

    COMPUTES = "computes"  # the computation or its results
    MACHINE = "machine"  # only the machine model: memory plan, cycles, schedule, profile
    RECORDED = "recorded"  # nothing: it is checked, kept and shown
    HOST = "host"  # the host: data loading, files, logging, wrapping


class Settable(Protocol):
    """An object with setters."""

    _PREFIX: ClassVar[str]  # how the object is reached from an `Options`, such as "Training."

    def checkIsFrozen(self) -> None:
        """Raise if nothing may change any more."""


_Owner = TypeVar("_Owner", bound=Settable)
_Arguments = ParamSpec("_Arguments")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_EFFECT = "__ipu_dynamo_effect__"


def setter(
    effect: Effect,
) -> Callable[
    [Callable[Concatenate[_Owner, _Arguments], None]],
    Callable[Concatenate[_Owner, _Arguments], _Owner],
]:
    """Make a method a setter: it carries `effect`, refuses frozen options and can be chained."""

    def decorate(
        method: Callable[Concatenate[_Owner, _Arguments], None],
    ) -> Callable[Concatenate[_Owner, _Arguments], _Owner]:
        @has_effect(effect)
        @functools.wraps(method)
        def call(owner: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Owner:
            if not hasattr(owner, "checkIsFrozen"):  # poptorch.TensorLocationSettings.useX(True)
                raise TypeError(
                    f"{method.__name__} is called on a class, with {owner!r} in place of the "
                    "object: make the object first, such as poptorch.Options() or "
                    f"poptorch.TensorLocationSettings(), and call {method.__name__} on it"
                )
            owner.checkIsFrozen()
            method(owner, *args, **kwargs)
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

"""Check one value of a configuration, at every assignment: its type, its bounds, its splits."""

import math
import types
from collections.abc import Mapping
from itertools import dropwhile
from typing import Any, Literal, Union, get_args, get_origin

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from ipu_dynamo.optimum.values import pod_types

OUTPUT_MODES = ("all", "sum", "final", "default")


class Field:
    """A field of a configuration: a descriptor whose values are always valid ones.

    Args:
        default: the value if the constructor gets none.
        lowest: the least value, or element of a list.
        splits: a list of parts of a layer per IPU.
        choices: all values that there are.
        by_pod: takes a dictionary from type of POD to value, too.
        option: the setting of `poptorch.Options`, or the part of the model, that it becomes.
        changes: the effect of that, for the guide.
    """

    def __init__(
        self,
        default: Any,
        option: str,
        changes: str,
        *,
        lowest: int | None = None,
        splits: bool = False,
        choices: tuple[str, ...] = (),
        by_pod: bool = True,
    ) -> None:
        self.default, self.option, self.changes = default, option, changes
        self.lowest, self.splits, self.choices, self.by_pod = lowest, splits, choices, by_pod
        self.name = ""
        self._owner: type | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self._owner = name, owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        self.check(value)
        vars(instance)[self.name] = value

    @property
    def declared(self) -> Any:
        """The type of its values."""
        assert self._owner is not None
        return self._owner.__annotations__[self.name]

    def check(self, value: Any) -> None:
        """Raise unless the field may have this value.

        Raises:
            TypeError: of another type than declared, also inside a list or dictionary.
            ValueError: infinite or no number, below its bound, no known word, or splits that
                cannot be.
        """
        if not self.takes_by_pod(value):
            return self._check_plain(value)
        if not value or not value.keys() <= set(pod_types.KEYS):
            keys = ", ".join(pod_types.KEYS)
            raise self._wrong_type(value, f", or a dictionary from some of {keys} to that")
        for one in value.values():
            if isinstance(one, dict):
                raise self._wrong_type(one, "")
            self._check_plain(one)
        return None

    def takes_by_pod(self, value: Any) -> bool:
        """Whether a value is a dictionary by type of POD."""
        return self.by_pod and isinstance(value, dict)

    def _check_plain(self, value: Any) -> None:
        try:
            check_type(
                value, self.declared, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS
            )
        except TypeCheckError:
            raise self._wrong_type(value, "") from None
        if value is None:
            return
        numbers = value if isinstance(value, list) else [value]
        if not all(math.isfinite(one) for one in numbers if isinstance(one, float)):
            raise ValueError(
                f"`IPUConfig` attribute `{self.name}` must have finite numbers, got {value!r}"
            )
        if self.lowest is not None and value != "auto":
            self._check_bound(value, self.lowest)
        if self.choices and value not in self.choices:
            raise ValueError(
                f"`IPUConfig` attribute `{self.name}` must be one of {', '.join(self.choices)}, "
                f"got {value!r}"
            )
        if self.splits:
            _check_splits(self.name, value)

    def _check_bound(self, value: Any, lowest: int) -> None:
        several = isinstance(value, list)
        if all(one >= lowest for one in (value if several else [value])):
            return
        must = "have all elements" if several else "be"
        raise ValueError(
            f"`IPUConfig` attribute `{self.name}` must {must} >= {lowest}, got {value!r}"
        )

    def _wrong_type(self, value: Any, more: str) -> TypeError:
        return TypeError(
            f"`IPUConfig` attribute `{self.name}` must be of type {type_text(self.declared)}{more}"
            f", got {value!r}, a {type(value).__name__}"
        )


def field(*args: Any, **kwargs: Any) -> Any:
    """A `Field` where its value's type is declared."""
    return Field(*args, **kwargs)


def type_text(declared: Any) -> str:
    """A declared type as a user writes it."""
    if get_origin(declared) in (Union, types.UnionType):
        return " | ".join(map(type_text, get_args(declared)))
    if get_origin(declared) is Literal:
        return " | ".join(map(repr, get_args(declared)))
    if declared is type(None):
        return "None"
    return str(declared) if get_origin(declared) else str(declared.__name__)


def fields_of(owner: type) -> dict[str, Field]:
    """The fields of a class and its bases by name, in order."""
    members = [member for base in reversed(owner.__mro__) for member in vars(base).items()]
    return {name: field for name, field in members if isinstance(field, Field)}


def plain(field: str, value: Any, pod_type: str | None) -> Any:
    """A field's value on a POD, where it is a dictionary; else the value."""
    return pod_types.entry(field, value, pod_type) if isinstance(value, Mapping) else value


def _check_splits(name: str, value: list[int]) -> None:
    if sum(value) < 1:
        raise ValueError(f"`IPUConfig` attribute `{name}={value}` must have atleast 1 split")
    inner = list(dropwhile(lambda parts: not parts, value))
    inner = list(dropwhile(lambda parts: not parts, reversed(inner)))
    if 0 in inner:
        raise ValueError(
            f"`IPUConfig` attribute `{name}={value}` must have its splits on consecutive IPUs"
        )

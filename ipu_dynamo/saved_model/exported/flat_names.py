"""Name the tensors inside arguments and results by where they are: `mask`, `output_1`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def named_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: list[str]
) -> dict[str, Any]:
    """The leaves of arguments: `x` is one's own name, `x_0` and `x_key` those within it.

    Args:
        names: of the positional arguments, and then of those by name; more of them may be there.

    Raises:
        ValueError: two have one name.
    """
    positional = [*names[: len(args)], *(f"args_{i}" for i in range(len(names), len(args)))]
    top = [*zip(positional, args, strict=True), *kwargs.items()]
    return _unique(pair for name, value in top for pair in _inside(name, value, _keep))


def named_outputs(value: Any) -> dict[str, Any]:
    """The leaves of a result by name, without those that are None.

    Raises:
        ValueError: two have one name, one is no tensor, or a key is no text.
    """
    return _unique(pair for name, part in _top(value) for pair in _inside(name, part, _tensor_only))


def _top(value: Any) -> list[tuple[str, Any]]:
    if (items := _items(value)) is not None:
        return items
    parts = value if isinstance(value, tuple | list) else [value]
    return [(f"output_{index}", part) for index, part in enumerate(parts)]


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a mapping, a dataclass or a named tuple; None for other values.

    A `ModelOutput` is both a mapping and a dataclass.
    """
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"the key {odd[0]!r} of a result is no text")
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return None


def _inside(name: str, value: Any, leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and leaf is _keep:
        parts: Any = [(str(key), part) for key, part in value.items()]
    elif (parts := _items(value)) is None:
        if not isinstance(value, tuple | list):
            if leaf(name, value):
                yield name, value
            return
        parts = [(str(index), part) for index, part in enumerate(value)]
    for key, part in parts:
        yield from _inside(f"{name}_{key}", part, leaf)


def _keep(name: str, value: Any) -> bool:
    return True


def _tensor_only(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, Tensor | Leaf):
        raise ValueError(f"result {name!r} is a {type(value).__name__}, not a tensor")
    return value is not None


class Leaf(int):
    """The position of a flat value, where a structure is known and values are not."""


def _unique(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise ValueError(f"two tensors have the name {name!r}")
        named[name] = value
    return named

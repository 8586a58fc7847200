"""Write values as text that `reader.py` reads back.

A value is None, True, a number, a string, a list, a tuple, a dict, or a `slice(...)`. It may also
be a dtype, layout or memory format (`torch.float32`), a `device("cuda:0")`, the layout of a tensor
(`f32[4,8]`), or a node of a graph (`%mm`). Any other dataclass is a record:
`Copy(value="mm", src=0)`. Strings are written as in JSON, so that all text is ASCII and a value is
one line.
"""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from json.encoder import encode_basestring_ascii
from types import NoneType
from typing import Any

import torch
from torch import fx

from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.ir.types import TensorType

_PLAIN: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((NoneType, bool, torch.dtype, torch.layout, torch.memory_format), str),
    TensorType: str,
    Layout: str,
    int: int.__repr__,
    float: float.__repr__,
    str: encode_basestring_ascii,
}


@cache
def _plain(kind: type) -> Callable[[Any], str] | None:
    """The function that writes the values of a class, if they have no parts."""
    return next((_PLAIN[base] for base in kind.__mro__ if base in _PLAIN), None)


def _refuse(value: object) -> str:
    raise ValueError(f"a value of type {type(value).__name__} has no text: {value!r}")


def write(
    value: Any,
    name_of: Callable[[fx.Node], str] = lambda node: node.name,
    otherwise: Callable[[object], str] = _refuse,
) -> str:
    """`value` as text.

    Args:
        name_of: returns the name of a node.
        otherwise: writes objects that are no values; the default raises ValueError.
    """

    if plain := _plain(value.__class__):
        return plain(value)

    def text(value: Any) -> str:
        if plain := _plain(value.__class__):
            return plain(value)
        match value:
            case fx.Node():
                return f"%{name_of(value)}"
            case complex():
                return f"complex({text(value.real)}, {text(value.imag)})"
            case torch.device():
                return f'device("{value}")'
            case slice():
                return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
            case list():
                return f"[{', '.join(map(text, value))}]"
            case tuple():
                return f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})"
            case dict():
                return f"{{{', '.join(f'{text(k)}: {text(v)}' for k, v in value.items())}}}"
        if is_dataclass(value) and not isinstance(value, type):
            return write_record(value, fields(value), text)
        return otherwise(value)

    return text(value)


def write_record(
    record: Any, among: Iterable[Field[Any]], text: Callable[[Any], str] = write
) -> str:
    """A dataclass on one line, with its fields `among` these that do not have their default."""
    parts = []
    for field in among:
        value = getattr(record, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value is default:
            continue
        written = text(value)
        if default is MISSING or written != text(default):
            parts.append(f"{field.name}={written}")
    return f"{word_of(type(record))}({', '.join(parts)})"


def word_of(record: type) -> str:
    """The name of a dataclass in text: its own, or its `WORD`, which older files have."""
    return str(record.__dict__.get("WORD", record.__name__))

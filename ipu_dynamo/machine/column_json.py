"""Write frozen dataclasses as JSON and read them back, as the types of their fields say.

A dataclass is an object. A tuple of dataclasses is an object, too, with a list for each field:
names are written once, not for each entry. Reading refuses every value whose type differs from that
of its field, and names its place. Equal values give equal bytes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LARGEST = 2**63
_SHOWN = 40  # characters of a refused value


def write_columns(record: Any) -> bytes:
    """A dataclass as JSON in ASCII.

    Raises:
        ValueError: a number is not finite.
    """
    written = _write(record, type(record))
    return f"{json.dumps(written, separators=(',', ':'), allow_nan=False)}\n".encode("ascii")


def read_columns(content: bytes, kind: Any, *, version: int) -> Any:
    """Inverse of `write_columns`.

    Args:
        kind: the dataclass, which has a field `version`.
        version: the only one that is read.

    Raises:
        ValueError: one line that says what is wrong, and where.
    """
    try:
        value = json.loads(content.decode("ascii"), object_pairs_hook=_once)
        found = value.get("version") if type(value) is dict else None
        if type(found) is int and found != version:
            raise ValueError(f"it has version {_shown(found)}; this package reads {version}")
        return _read(value, kind, kind.__name__)
    except RecursionError:
        raise ValueError("too many brackets in brackets") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("an object has a name twice")
    return entries


@cache
def _kinds(record: Any) -> dict[str, Any]:
    """The type of every field."""
    hints = get_type_hints(record)
    return {field.name: hints[field.name] for field in fields(record)}


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind)


def _element(kind: Any) -> Any:
    """The type of the entries of a `tuple[X, ...]`; None for another type."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def _write(value: Any, kind: Any) -> Any:
    if (element := _element(kind)) is not None:
        return _write_all(value, element)
    if not _is_record(kind):
        return value
    return {name: _write(getattr(value, name), of) for name, of in _kinds(kind).items()}


def _write_all(values: Sequence[Any], kind: Any) -> Any:
    if not _is_record(kind):
        return [_write(value, kind) for value in values]
    return {
        name: _write_all([getattr(value, name) for value in values], of)
        for name, of in _kinds(kind).items()
    }


def _read(value: Any, kind: Any, place: str) -> Any:
    if (element := _element(kind)) is not None:
        return tuple(_read_all(value, element, place))
    if not _is_record(kind):
        return _plain(value, kind, place)
    _check_names(value, kind, place)
    return _make(kind)(
        **{name: _read(value[name], of, f"{place}.{name}") for name, of in _kinds(kind).items()}
    )


def _read_all(value: Any, kind: Any, place: str) -> list[Any]:
    """The entries of a tuple of this type."""
    if not _is_record(kind):
        if type(value) is not list:
            raise ValueError(f"{place} is {_shown(value)}, not a list")
        return [_read(one, kind, place) for one in value]
    _check_names(value, kind, place)
    columns = [_read_all(value[name], of, f"{place}.{name}") for name, of in _kinds(kind).items()]
    if len({len(column) for column in columns}) != 1:
        raise ValueError(f"{place} has lists of different lengths")
    return [_make(kind)(*entry) for entry in zip(*columns, strict=True)]


def _make(kind: Any) -> Callable[..., Any]:
    return kind  # type: ignore[no-any-return]  # a class


def _check_names(value: Any, kind: Any, place: str) -> None:
    if type(value) is not dict:
        raise ValueError(f"{place} is {_shown(value)}, not an object")
    if odd := sorted(value.keys() ^ _kinds(kind).keys()):
        raise ValueError(f"{place} lacks, or should not have: {_shown(', '.join(odd))}")


def _plain(value: Any, kind: Any, place: str) -> Any:
    """A value that JSON has, if it is of this type."""
    allowed = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for one in allowed:
        if get_origin(one) is Literal:
            if type(value) is str and value in get_args(one):
                return value
        elif one is None or one is NoneType:
            if value is None:
                return value
        elif type(value) is one and (one not in (int, float) or _is_number(value)):
            return value
    names = " or ".join(_kind_name(one) for one in allowed)
    raise ValueError(f"{place} is {_shown(value)}, not {names}")


def _is_number(value: float) -> bool:
    return abs(value) < _LARGEST  # no number is less than NaN


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return "null" if kind is NoneType else f"a JSON {kind.__name__}"


def _shown(value: Any) -> str:
    """The begin of a value, in one line of ASCII."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

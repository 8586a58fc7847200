"""Write nested Python values as JSON and read them back: tuples, lists, dicts, plain leaves.

A tensor stands as its dtype. Named tuples have to be registered, here and where they are read: a
name in a file imports nothing.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.program.ir.types import DTYPES
from ipu_dynamo.saved.json_text import expect
from ipu_dynamo.saved.refusal import Reason, SavedProgramError

_DEEPEST = 32
_named_tuples: dict[str, type[tuple[Any, ...]]] = {}
_INTEGER = re.compile(r"-?\d{1,1000}", re.ASCII)


def register_named_tuple(kind: type[tuple[Any, ...]], name: str = "") -> None:
    """Let saved programs take and return a named tuple.

    Args:
        kind: the class.
        name: its name in files; the default is its module and its qualified name.

    Raises:
        ValueError: it is no named tuple, or another one has the name.
    """
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"{kind.__qualname__} is no named tuple")
    name = name or f"{kind.__module__}.{kind.__qualname__}"
    if _named_tuples.setdefault(name, kind) is not kind:
        raise ValueError(f"another named tuple is registered as {name}")


def write_value(value: Any, where: str) -> Any:
    """`value` as JSON.

    Args:
        where: its name in errors, `argument x`; a path is appended for a part of it.

    Raises:
        SavedProgramError: there is something else in it.
    """
    return _write(value, where, 0)


def _write(value: Any, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise _refused(where, f"is nested more than {_DEEPEST} times")
    if isinstance(value, Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch.")}
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": str(value)}
    if kind is float:
        return {"float": repr(value)}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind in (tuple, list):
        return {kind.__name__: _all(value, where, depth)}
    if kind in (dict, OrderedDict):
        for key in value:
            if type(key) not in (str, int, bool):
                raise _refused(where, f"has a key of type {type(key).__name__}")
        pairs = [
            [_write(key, where, depth), _write(item, f"{where}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {kind.__name__: pairs}
    name = next((name for name, known in _named_tuples.items() if known is kind), None)
    if name is not None:
        return {"named": name, "items": _all(value, where, depth)}
    hint = ""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        hint = f"ipu_dynamo.register_named_tuple({kind.__qualname__}), here and before loading"
    raise _refused(where, f"is a {kind.__module__}.{kind.__qualname__}", hint)


def _all(items: Sequence[Any], where: str, depth: int) -> list[Any]:
    return [_write(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(items)]


def read_value(written: Any, tensor: Callable[[torch.dtype], Any]) -> Any:
    """Inverse of `write_value`.

    Args:
        tensor: makes a placeholder for a tensor of a dtype.

    Raises:
        SavedProgramError: it is nothing that `write_value` writes, or needs a named tuple that is
            not registered.
    """
    return _read(written, tensor, 0)


def _read(written: Any, tensor: Callable[[torch.dtype], Any], depth: int) -> Any:
    if depth > _DEEPEST:
        raise SavedProgramError(Reason.LIMIT, f"a value is nested more than {_DEEPEST} times")

    def items(parts: Any) -> list[Any]:
        return [_read(part, tensor, depth + 1) for part in expect(parts, list, "a value")]

    match written:
        case None | bool() | str():
            return written
        case {"tensor": str(name)} if len(written) == 1 and name in DTYPES:
            return tensor(DTYPES[name])
        case {"int": str(text)} if len(written) == 1 and _INTEGER.fullmatch(text):
            return int(text)
        case {"float": str(text)} if len(written) == 1:
            return _float(text)
        case {"complex": [str(real), str(imaginary)]} if len(written) == 1:
            return complex(_float(real), _float(imaginary))
        case {"tuple": parts} if len(written) == 1:
            return tuple(items(parts))
        case {"list": parts} if len(written) == 1:
            return items(parts)
        case {"dict": pairs} if len(written) == 1:
            return _dictionary(pairs, items)
        case {"OrderedDict": pairs} if len(written) == 1:
            return OrderedDict(_dictionary(pairs, items))
        case {"named": str(name), "items": parts} if len(written) == 2:
            return _named(name, items(parts))
    raise SavedProgramError(Reason.CONTENT, "a value is none that this package writes")


def _dictionary(pairs: Any, items: Callable[[Any], list[Any]]) -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    for pair in expect(pairs, list, "a dictionary"):
        read = items(pair)
        if len(read) != 2 or type(read[0]) not in (str, int, bool) or read[0] in entries:
            raise SavedProgramError(Reason.CONTENT, "a dictionary has a key that cannot be")
        entries[read[0]] = read[1]
    return entries


def _named(name: str, parts: list[Any]) -> Any:
    kind = _named_tuples.get(name)
    if kind is None:
        raise SavedProgramError(
            Reason.CONTENT,
            f"the named tuple {name!r} is not registered here",
            hint="ipu_dynamo.register_named_tuple(...) it first",
        )
    if len(parts) != len(kind._fields):  # type: ignore[attr-defined]
        raise SavedProgramError(Reason.CONTENT, f"the named tuple {name} has other fields here")
    return tuple.__new__(kind, parts)


def _float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if repr(number) != text:
        raise SavedProgramError(Reason.CONTENT, "a number is none that this package writes")
    return number


def _refused(where: str, problem: str, hint: str = "") -> SavedProgramError:
    allowed = "tensors, numbers, strings, None, tuples, lists, dicts and registered named tuples"
    hint = hint or f"take and return {allowed} only"
    return SavedProgramError(Reason.CANNOT_SAVE, f"{where} {problem}", part=where, hint=hint)

"""Read the text of `IPUConfig.update_from_string`, all of it before anything is set."""

import logging
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from ipu_dynamo.optimum.values.fields import Field, type_text

log = logging.getLogger(__name__)
_TRUE = frozenset({"true", "1", "y", "yes"})
_FALSE = frozenset({"false", "0", "n", "no"})


def read_update(text: str, fields: Mapping[str, Field]) -> dict[str, Any]:
    """The values that a text gives to fields, checked.

    Args:
        text: pairs `key=value`, with commas between; a list is `[a b c]`. Of a key that stands
            twice the last one counts, so that a program may append to what its user gives.

    Raises:
        ValueError: grammar, an unknown key, or a text that its field cannot have.
    """
    values = {}
    for pair in text.split(","):
        name, equals, written = (part.strip() for part in pair.partition("="))
        if not equals or not name or "=" in written:
            raise ValueError(f"{pair!r} in {text!r} is no pair key=value")
        if name not in fields:
            raise ValueError(f"an IPUConfig has no field {name!r}, which {text!r} sets")
        value = _value(name, written, fields[name])
        fields[name].check(value)
        if name in values:
            log.warning("%r sets %s twice, and the last one counts: %r", text, name, value)
        values[name] = value
    return values


def _value(name: str, written: str, field: Field) -> Any:
    """Parse a field's text, by the declared type."""
    forms = _forms(field.declared)
    wrong = ValueError(f"{name} cannot be {written!r}: its type is {type_text(field.declared)}")
    try:
        if written.startswith("[") and written.endswith("]"):
            (element,) = (get_args(form)[0] for form in forms if get_origin(form) is list)
            return [_scalar(part, element) for part in written[1:-1].split()]
        if any(get_origin(form) is Literal and written in get_args(form) for form in forms):
            return written
        (kind,) = (form for form in forms if form in (bool, int, float, str))
        return _scalar(written, kind)
    except ValueError:
        raise wrong from None


def _forms(declared: Any) -> tuple[Any, ...]:
    """The types that a declared one consists of, without None."""
    if get_origin(declared) in (Union, types.UnionType):
        return tuple(form for form in get_args(declared) if form is not type(None))
    return (declared,)


def _scalar(written: str, kind: Any) -> Any:
    """A number, a word or a truth value.

    Raises:
        ValueError: the text is not of this kind.
    """
    if kind is not bool:
        return kind(written)
    if written.lower() in _TRUE:
        return True
    if written.lower() in _FALSE:
        return False
    raise ValueError(written)

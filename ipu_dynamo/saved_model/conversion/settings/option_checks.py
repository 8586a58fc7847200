"""Check values of a conversion's options; errors name the option."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ipu_dynamo.saved_model.files.placement_entry import LARGEST_NUMBER


def is_list(value: object) -> bool:
    """Whether a value is what JSON calls a list; libraries may bring tuples."""
    return isinstance(value, list | tuple)


def flag(name: str, value: Any) -> bool:
    """`value`, if it is true or false.

    Raises:
        ValueError: it is neither.
    """
    if type(value) is not bool:
        raise ValueError(f"{name} is {value!r}, not true or false")
    return value


def integer(
    name: str,
    value: Any,
    least: int,
    error: type[Exception] = ValueError,
    most: int = LARGEST_NUMBER,
) -> int:
    """`value`, if it is an integer from `least` to `most`.

    Raises:
        ValueError: it is less or more; or `error`, if it is no integer.
    """
    if type(value) is not int:
        raise error(f"{name} is {value!r}, not an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; it is at least {least}")
    if value > most:
        raise ValueError(f"{name} is more than {most}")
    return value


def proportion(name: str, value: Any) -> float:
    """`value`, if it is a number from 0 to 1.

    Raises:
        ValueError: it is not.
    """
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}, not a number from 0 to 1")
    return float(value)


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, if it is one of the choices.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; choose {' or '.join(choices)}")
    return value


def text(name: str, value: Any) -> str:
    """`value`, if it is a text that is not empty.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}, not a text")
    return value


def expressions(
    name: str, value: Any, error: type[Exception] = TypeError, problem: str = "must be a list"
) -> tuple[str, ...]:
    """A list of regular expressions.

    Raises:
        ValueError: an expression is wrong; or `error`, with `problem`, if it is no list of texts.
    """
    if not is_list(value) or not all(isinstance(item, str) for item in value):
        raise error(f"{name} {problem} of regular expressions, not {value!r}")
    for expression in value:
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as wrong:
            raise ValueError(f"{name}: {expression!r} is no regular expression: {wrong}") from wrong
    return tuple(value)


def lists_of_expressions(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """A list of lists of regular expressions.

    Raises:
        TypeError: it is something else.
        ValueError: an expression is wrong.
    """
    if not is_list(value):
        raise TypeError(f"{name} must be a list, not {value!r}")
    for item in value:
        if not is_list(item) or not all(isinstance(part, str) for part in item):
            raise TypeError(f"{name} must only contain lists of strings, not {item!r}")
    return tuple(expressions(name, item) for item in value)


def no_other_keys(name: str, value: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ValueError if an object has a key that is not one of `keys`."""
    if unknown := [key for key in value if key not in keys]:
        raise ValueError(f"{name} has a key {unknown[0]!r}; it may have {', '.join(keys)}")

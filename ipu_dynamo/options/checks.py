"""Check names and values of options."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, TypeVar, get_args, get_origin

from ipu_dynamo.errors import OptionError

MOST_IPUS = 1024  # of the largest systems of IPUs that were built: Bow Pod1024


def check_choice(name: str, value: object, choices: Sequence[str], what: str = "option") -> None:
    """Raise unless an option has one of a few values.

    Args:
        what: the word before its name.
    """
    if value not in choices:
        raise OptionError(f"{what} {name} is {value!r}; choose one of {', '.join(choices)}")


def check_choices(options: Any, what: str = "option") -> None:
    """Raise unless each field of a dataclass that is a `Literal` has one of its values."""
    for field in fields(options):
        if get_origin(field.type) is Literal:
            value = getattr(options, field.name)
            check_choice(field.name, value, get_args(field.type), what)


def check_names(
    given: Iterable[object], known: Sequence[str], others: Callable[[str], str] = lambda name: ""
) -> None:
    """Raise for an option that does not exist; say which ones have a name like it.

    Args:
        others: what to say of a name that is an option of something else; empty: it is none.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=3)
            which = f"did you mean: {', '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise OptionError(f"there is no option {name!r}; {others(str(name)) or which}")


def check_count(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless an option is an integer of at least 1, or None where that is allowed.

    Args:
        name: of the option, as "option replicas".
    """
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        wanted = "an int of at least 1, or None" if or_none else "an int of at least 1"
        raise OptionError(f"{name} takes {wanted}, not {described(value)}")


def described(value: object) -> str:
    """A value that does not fit, in an error: `0`, or `the str '4'`."""
    return str(value) if type(value) is int else f"the {type(value).__name__} {value!r}"


_Class = TypeVar("_Class", bound=type)


def named_options(options: _Class, others: Callable[[str], str] = lambda name: "") -> _Class:
    """Let a dataclass refuse unknown options as `check_names` does."""
    init, known = vars(options)["__init__"], [field.name for field in fields(options)]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check_names(kwargs, known, others)
        init(self, *args, **kwargs)

    type.__setattr__(options, "__init__", checked)
    return options


def check_ipu_id(ipu_id: object) -> None:
    """Raise unless a value is the number of an IPU, or None."""
    if ipu_id is None:
        return
    if not isinstance(ipu_id, int) or isinstance(ipu_id, bool) or not 0 <= ipu_id < MOST_IPUS:
        raise OptionError(
            f"ipu_id is {ipu_id!r}; it is an int from 0 to {MOST_IPUS - 1}, or None: the strategy "
            "chooses"
        )

"""Check names and values of options."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from ipu_dynamo.errors import OptionError

MOST_IPUS = 1024  # of the largest systems of IPUs that were built: Bow Pod1024


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless an option has one of a few values."""
    if value not in choices:
        raise OptionError(f"option {name} is {value!r}; choose one of {', '.join(choices)}")


def check_names(given: Iterable[object], known: Sequence[str]) -> None:
    """Raise for an option that does not exist; say which ones have a name like it."""
    for name in given:
        if name not in known:
            near = ", ".join(get_close_matches(str(name), known, n=3)) or ", ".join(known)
            raise OptionError(f"there is no option {name!r}; did you mean: {near}?")


def check_ipu_id(ipu_id: object) -> None:
    """Raise unless a value is the number of an IPU, or None."""
    if ipu_id is None:
        return
    if not isinstance(ipu_id, int) or isinstance(ipu_id, bool) or not 0 <= ipu_id < MOST_IPUS:
        raise OptionError(
            f"ipu_id is {ipu_id!r}; it is an int from 0 to {MOST_IPUS - 1}, or None: the strategy "
            "chooses"
        )

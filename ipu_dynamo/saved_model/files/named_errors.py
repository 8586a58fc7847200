"""Let errors of the system say which option the path comes from."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Raise an `OSError` of the block anew, with the option in its text; the innermost counts."""
    try:
        yield
    except OSError as error:
        if getattr(error, "option", None) is not None:
            raise
        raise _named(error, option) from error


def _named(error: OSError, option: str) -> OSError:
    if error.errno is None:
        named = type(error)(f"{option}: {error}")
    else:  # of the class that belongs to the number
        named = OSError(error.errno, f"{option}: {error.strerror}", error.filename)
    named.option = option  # type: ignore[attr-defined]
    return named

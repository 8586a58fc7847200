"""Warn users, and keep the warnings of a compilation to be looked at later."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_noted: ContextVar[list[str] | None] = ContextVar("ipu_dynamo_noted_warnings", default=None)


@contextmanager
def noting() -> Iterator[list[str]]:
    """Collect the texts of all `warn` in this block, also if the user's filters hide them."""
    texts: list[str] = []
    token = _noted.set(texts)
    try:
        yield texts
    finally:
        _noted.reset(token)


def warn(text: str, *, stacklevel: int = 1) -> None:
    """Warn as `warnings.warn` does; the innermost `noting` block keeps the text."""
    if (texts := _noted.get()) is not None:
        texts.append(text)
    warnings.warn(text, stacklevel=stacklevel + 1)

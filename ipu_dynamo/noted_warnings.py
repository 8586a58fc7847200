"""Warn users, and keep the warnings of a compilation to be looked at later."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ipu_dynamo.errors import is_library

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


def warn(text: str) -> None:
    """Warn of the innermost line of the user's that led here; `noting` around it keeps the text."""
    if (texts := _noted.get()) is not None:
        texts.append(text)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)

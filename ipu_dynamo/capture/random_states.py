"""Notice random numbers that Python draws on the host: a trace would draw them once for all."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ipu_dynamo import noted_warnings


def random_states() -> tuple[Any, ...]:
    """The states of Python's generator and of NumPy's global one: draws change them."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), tuple(
        part if isinstance(part, int | float | str) else bytes(part) for part in drawn
    )


@contextmanager
def draws_reported() -> Iterator[None]:
    """Warn of numbers that a model draws in Python: every call of its program has those."""
    before = random_states()
    yield
    if random_states() != before:
        noted_warnings.warn(
            "forward draws random numbers of Python or NumPy, which become constants of the "
            "program: every call uses the numbers of this one; draw them with torch, or outside of "
            "the model and pass them as an input",
        )

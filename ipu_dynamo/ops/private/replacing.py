"""Replace names of PyTorch for a while, so that other threads find what they had before.

Who replaces holds `compile_lock`, so that names that are replaced twice come back in order.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


class TrueInThisThread:
    """True in the thread that makes it, false in all others."""

    def __init__(self) -> None:
        self._thread = threading.local()  # not its number, which may belong to another one later
        self._thread.value = True

    def __bool__(self) -> bool:
        return getattr(self._thread, "value", False)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: bool) -> bool:
        return bool(self) | other

    def __and__(self, other: bool) -> bool:
        return bool(self) & other

    def __xor__(self, other: bool) -> bool:
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__


def in_this_thread(
    function: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """What calls `function` in the thread that calls this, and `original` in all others."""
    is_here = TrueInThisThread()

    @wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if is_here else original)(*args, **kwargs)

    return chosen


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give `owner` another attribute `name` for a while; an inherited one is only hidden.

    Other threads find it, too: `value` has to be right for them, as `in_this_thread` makes it.
    """
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

"""Replace names of PyTorch in one thread for a while; other threads see the original.

Hold `compile_lock` around a replacement, so that names replaced twice are restored in order.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper, wraps
from types import FunctionType, MethodType
from typing import Any


class TrueInThisThread:
    """True in the thread that makes it, false in all others."""

    def __init__(self) -> None:
        self._thread = threading.local()  # not its number, which may belong to another one later
        self._thread.value = True

    def __bool__(self) -> bool:
        return getattr(self._thread, "value", False)

    def end(self) -> None:
        """Be false in every thread from now on."""
        self._thread = threading.local()

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
    """Make a callable that is `function` in this thread, and `original` in all others."""
    is_here = TrueInThisThread()

    @wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if is_here else original)(*args, **kwargs)

    chosen.is_here = is_here  # type: ignore[attr-defined]
    return chosen


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give `owner` another attribute `name` for a while; an inherited one is only hidden.

    Other threads find it, too: `value` has to be right for them, as `in_this_thread` makes it.
    Another patcher may replace the name meanwhile, and end later. Its value stays then. `value` is
    the original when that patcher puts it back, and a class gets the original itself.
    """
    if isinstance(owner, type) and isinstance(value, FunctionType):
        getattr(owner, name, None)  # an ended replacement goes when it is read
        value = _Replacement(owner, name, value)
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is value:  # remove only this replacement
            _put_back(owner, name, before, own)
        else:
            is_here = getattr(value, "is_here", value)
            if isinstance(is_here, TrueInThisThread):
                is_here.end()
            if isinstance(value, _Replacement):
                value.original = before, own


def _put_back(owner: Any, name: str, before: Any, own: bool) -> None:
    if own:
        setattr(owner, name, before)
    else:
        delattr(owner, name)


class _Replacement:
    """A function in place of a class's own; the first read after its end removes it.

    Attributes:
        original: the replaced value, and whether the class itself had it; None before it ends.
    """

    def __init__(self, owner: type, name: str, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._owner, self._name, self._function = owner, name, function
        self.original: tuple[Any, bool] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, kind: Any) -> Any:
        if self.original is not None and vars(self._owner).get(self._name) is self:
            _put_back(self._owner, self._name, *self.original)
            return getattr(kind if instance is None else instance, self._name)
        return self if instance is None else MethodType(self._function, instance)

"""Let other threads see a module's own tensors while one thread traces it with stand-ins."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

_own: dict[int, Tensor] = {}  # by the id of a stand-in
_traces = 0  # that have ended
_PATIENCE = 1.0


def own_tensor(value: Any) -> Any:
    """The module's own tensor if `value` stands for one in a trace, else `value`."""
    return _own.get(id(value), value)


def own_slots(module: nn.Module, kind: str) -> dict[str, Tensor | None]:
    """The own `_parameters` or `_buffers` of a module; no hook of the module is called."""
    while True:
        before = _traces
        slots = {n: own_tensor(value) for n, value in list(vars(module).get(kind, {}).items())}
        if _traces == before:  # else its stand-ins are not known any more
            return slots


def _let_others_return(codes: AbstractSet[CodeType]) -> None:
    """Wait for calls of functions in other threads, which began before these were replaced.

    A call may wait for this thread itself: it gets `_PATIENCE` seconds.
    """
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and any(
        thread != threading.get_ident() and not codes.isdisjoint(_codes_on(frame))
        for thread, frame in sys._current_frames().items()
    ):
        time.sleep(0.0001)


def _codes_on(frame: FrameType | None) -> Iterator[CodeType]:
    """The code of each function that a thread is in."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


@contextmanager
def own_tensors_elsewhere(stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
    """Give other threads their own tensors, by attributes, iteration and `state_dict`.

    Args:
        stand_ins: the own tensors, by the id of each one's stand-in.
    """
    global _traces
    attribute, members = nn.Module.__getattr__, nn.Module._named_members
    save = nn.Module._save_to_state_dict

    def own_attribute(module: nn.Module, name: str) -> Any:
        return own_tensor(attribute(module, name))

    def own_members(module: nn.Module, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def of(each: nn.Module) -> list[tuple[str, Any]]:
            return [(name, own_tensor(value)) for name, value in get(each)]

        return members(module, of, *args, **kwargs)

    def save_own(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        twin = object.__new__(type(module))
        own = {kind: own_slots(module, kind) for kind in ("_parameters", "_buffers")}
        vars(twin).update(vars(module), **own)
        save(twin, *args, **kwargs)

    with ExitStack() as stack:
        for name, original, own in (
            ("__getattr__", attribute, own_attribute),
            ("_named_members", members, own_members),
            ("_save_to_state_dict", save, save_own),
        ):
            stack.enter_context(replaced(nn.Module, name, in_this_thread(original, own)))
        _own.update(stand_ins)
        try:
            originals: tuple[Any, ...] = (attribute, members, save)
            _let_others_return({f.__code__ for f in originals if hasattr(f, "__code__")})
            yield
        finally:
            _traces += 1  # before they are forgotten
            for key in stand_ins:
                _own.pop(key, None)

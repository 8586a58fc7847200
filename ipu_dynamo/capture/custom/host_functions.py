"""Let a model call Python functions of the host, with values, while its program runs.

A trace calls the function once, on zeros, to learn the form of its results, and records one
operator.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch

from ipu_dynamo.capture.custom.nested_call import TENSOR, NestedCall
from ipu_dynamo.capture.private.tracing import (
    outside_function_modes,
    outside_modes,
)
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.library.host_call import KnownFunction, layout, register


@dataclass
class HostCalls:
    """Hold the state of a trace that calls of host functions need.

    Args:
        training: a program is made that trains.
        own_tensors: puts the model's own tensors in the place of stand-ins for a while.
        kept: the functions that are called, to be kept with the program.
    """

    training: bool
    own_tensors: Callable[[], AbstractContextManager[None]]
    kept: list[KnownFunction] = field(default_factory=list)


_trace: ContextVar[HostCalls | None] = ContextVar("host_calls", default=None)
_here = threading.local()
_CONSTANTS = (bool, int, float, complex, str, NoneType)


def on_host() -> bool:
    """Whether this thread is inside a host function that a trace calls."""
    return getattr(_here, "depth", 0) > 0


@contextmanager
def host_calls(trace: HostCalls) -> Iterator[None]:
    """Record the calls of host functions for `trace`."""
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


class HostFunction:
    """A function that the host runs in the middle of a program.

    Calling it in a model that `compile_inference` compiles makes one operator. The operator calls
    the function once for each micro-batch and replica, in the order of micro-batches, one thread at
    a time. The function gets copies of tensors, on the CPU; it may look at values, and use any
    library. During compilation it is called once, on zeros. This call fixes the shapes and types of
    its tensors. Its other results are None, bools, numbers and strings: constants of the program,
    which each call has to return again. Outside of such a model the function is just called.
    Programs with it cannot be saved.

    Args:
        function: takes tensors and other values, returns any structure of tensors.
        name: what errors and programs call it; "": its own.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any) -> Any:
        """Call the function, and return its result.

        Args:
            args: tensors and other values, which the function gets.

        Raises:
            CompileError: in a model that is compiled for training.
        """
        trace = _trace.get()
        if trace is None or on_host():
            return self.function(*args)
        if trace.training:
            raise CompileError(
                f"the host function {self.name} has no gradient: it cannot be in training",
                where=called_from(),
                hint="write it as operators of PyTorch, or compile for inference",
                id="operator",
            )
        return _recorded(self.function, self.name, args, trace)


class _HostCall(NestedCall):
    """A call of a host function; what it returns besides tensors has to stay."""

    def __init__(self, function: Callable[..., Any], name: str, args: Sequence[Any]) -> None:
        super().__init__(function, args, {})
        self._name = name

    def keep(self, leaves: list[Any], spec: Any) -> None:
        if self.result is None:
            _check_constants(leaves, self._name)
        elif repr(leaves) != repr(self.result[0]) or spec != self.result[1]:
            raise RuntimeError(
                f"the host function {self._name} returned {_shown(leaves)} besides tensors, and "
                f"{_shown(self.result[0])} when compiling: return values that depend on the "
                "arguments as tensors"
            )
        super().keep(leaves, spec)


def _recorded(
    function: Callable[..., Any], name: str, args: Sequence[Any], trace: HostCalls
) -> Any:
    call = _HostCall(function, name, args)
    count = len(call.tensors)
    with _on_host(trace):
        zeros = [torch.zeros(t.shape, dtype=t.dtype) for t in call.tensors]
        results = [layout(tensor) for tensor in call(zeros)]
    # An operator needs a tensor to be found by; the function does not get it.
    known = register(name, lambda tensors: call(tensors[:count]))
    trace.kept.append(known)
    operands = call.tensors or [torch.zeros(())]
    return call.rebuilt(torch.ops.ipu.host_call(operands, known.name, results))


def _check_constants(others: Sequence[Any], name: str) -> None:
    """Refuse results whose values a later call cannot be compared with, such as NumPy's arrays."""
    for value in others:
        if value is not TENSOR and not isinstance(value, _CONSTANTS):
            raise CompileError(
                f"the host function {name} returned a {type(value).__name__}, which a program "
                "cannot take from the host",
                where=called_from(),
                hint="return tensors, such as torch.from_numpy(array)",
                id="operator",
            )


def _shown(others: Sequence[Any]) -> str:
    return ", ".join(repr(value) for value in others if value is not TENSOR) or "nothing"


@contextmanager
def _on_host(trace: HostCalls) -> Iterator[None]:
    """Run a function as outside of the trace: on real tensors, unrecorded."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        with ExitStack() as stack:
            stack.enter_context(trace.own_tensors())
            stack.enter_context(outside_modes())
            stack.enter_context(outside_function_modes())
            stack.enter_context(torch.no_grad())
            yield
    finally:
        _here.depth -= 1

"""Run Keras' Python as a program needs it, in the thread that traces."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ipu_dynamo.capture.private.tracing import DATA_DEPENDENT, is_fake, pytree
from ipu_dynamo.errors import CompileError, raised_at
from ipu_dynamo.keras.private.stateless_names import is_layer, traceback_utils
from ipu_dynamo.keras.step.conditions import conditions_merged
from ipu_dynamo.keras.step.draws import GeneratorOfModel, draws_keyed
from ipu_dynamo.keras.step.value_free_operators import operators_value_free
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced


@contextmanager
def keras_traced(own_generator: GeneratorOfModel, constants: "Constants") -> Iterator[None]:
    """Merge conditions, key random numbers, count without values, and leave tracebacks whole.

    Args:
        own_generator: gives the seed generator of draws that name none.
        constants: notes the tensors and arrays that are read.

    Raises:
        CompileError: a layer asks for the value of a tensor.
    """
    with ExitStack() as stack:
        stack.enter_context(conditions_merged())
        stack.enter_context(draws_keyed(own_generator))
        stack.enter_context(operators_value_free())
        stack.enter_context(_whole_tracebacks())
        stack.enter_context(constants)
        try:
            yield
        except DATA_DEPENDENT as error:
            layer = _innermost_layer(error.__traceback__)
            if layer is None:
                raise
            raise CompileError(
                f"layer {layer.name} ({type(layer).__name__}) depends in Python on the value of a "
                "tensor, which is not known when compiling",
                where=raised_at(error.__traceback__),
                hint="compute with tensors (keras.ops.where, keras.ops.cond), or move the decision "
                "out of the model",
                id="value",
            ) from error


class Constants(TorchFunctionMode):
    """Note the tensors and arrays of objects that a trace reads, as the factor of a regulariser.

    They are constants of the program, which is right for as long as they hold the same values.
    Numbers are meant to be constants: a warning is for tensors with dimensions.

    Args:
        tensors: whether to look at tensors, and not at arrays only.
    """

    def __init__(self, *, tensors: bool = True) -> None:
        super().__init__()
        self._held = (torch.Tensor, np.ndarray) if tensors else (np.ndarray,)
        self._read: dict[int, Any] = {}
        self._copies: list[tuple[Any, Any]] = []

    def keep(self) -> None:
        """Copy the values, once the trace is over."""
        self._copies = [(value, copy.deepcopy(value)) for value in self._read.values()]

    def same(self) -> bool:
        """Whether all that was read has the values that it had."""
        return all(_equal(value, known) for value, known in self._copies)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(self._held, self._noted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            self._read[id(value)] = value
            return value
        if is_fake(value) or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return value
        self._read[id(value)] = value
        if value.dim() or type(value) is torch.nn.Parameter:
            return value
        return aten.lift_fresh_copy(value)


def _equal(value: Any, known: Any) -> bool:
    """Whether two tensors or arrays are equal; NaN equals NaN."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype == known.dtype and value.tobytes() == known.tobytes())
    return torch.equal(value, known) or torch.equal(_bytes(value), _bytes(known))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _whole_tracebacks() -> Any:
    """Keras would cut its own frames out of them, and errors are made anew with texts around."""
    name = "is_traceback_filtering_enabled"
    original = getattr(traceback_utils, name)
    return replaced(traceback_utils, name, in_this_thread(lambda: False, original))


def running_layer() -> Any:
    """The layer whose `call` is running in this thread; None: none is."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "call" and is_layer(owner):
            return owner
        frame = frame.f_back
    return None


def _innermost_layer(trace: TracebackType | None) -> Any:
    """The layer whose `call` was running when an error was raised."""
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if is_layer(owner) and trace.tb_frame.f_code.co_name == "call":
            found = owner
        trace = trace.tb_next
    return found

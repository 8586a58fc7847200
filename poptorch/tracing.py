"""Know whether a model is being traced, and what its trace needs from PopTorch."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ipu_dynamo.blocks import numbering
from ipu_dynamo.capture.private.tracing import is_fake, seen_on
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced
from poptorch.errors import createPoptorchError

_DEVICES = ("ipu", "xla")  # the second: a name in programs for PopTorch 3
_IPU = torch.device("ipu", 0)
_AUTOCAST = (
    (torch.autocast, "__init__"),
    (torch, "is_autocast_enabled"),
    (torch, "get_autocast_dtype"),
)
_SHOWN = {  # the attributes that tensors of a trace show to users' code
    Tensor.is_ipu.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}
_MASKED = {  # where the mask is: of type uint8 in programs for the PyTorch of PopTorch 3
    torch.where: 0,
    **{
        getattr(owner, name): 1
        for name in ("masked_fill", "masked_scatter", "masked_fill_", "masked_scatter_")
        for owner in (torch, Tensor)
        if hasattr(owner, name)
    },
}
_TORCH_GENERATOR = torch.Generator
_LIBRARIES = frozenset({"torch", "ipu_dynamo", "poptorch"})  # they read the device that computes


@dataclass
class Trace:
    """One trace of a model.

    Args:
        training: a program is made that trains.
        block_numbers: the automatic ids of blocks, from 0.
        tensor_numbers: of the tensors that were asked for, from 1.
    """

    training: bool = False
    block_numbers: Iterator[int] = field(default_factory=itertools.count)
    tensor_numbers: "WeakIdKeyDictionary" = field(default_factory=WeakIdKeyDictionary)

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor of this trace: another one for every other tensor."""
        numbers = self.tensor_numbers
        return int(numbers.setdefault(tensor, len(numbers) + 1))

    def next_block_id(self) -> str:
        """The id of a block that was given none."""
        return str(next(self.block_numbers))

    def restart_block_ids(self) -> None:
        """Number blocks from 0 again."""
        self.block_numbers = itertools.count()


_current: ContextVar[Trace | None] = ContextVar("poptorch_trace", default=None)


def isRunningOnIpu() -> bool:
    """Whether the code that asks is part of a model that is being traced for an executor.

    The answer is taken once, when compiling: the path chosen by it is the program's path.
    """
    return _current.get() is not None


def getIpuTensorId(tensor: Tensor) -> int:
    """Return a number that distinguishes a tensor of the running trace from the others.

    Args:
        tensor: an input, a parameter or a result of an operator.

    Raises:
        poptorch.Error: there is no trace, or the tensor is not part of it.
    """
    trace = current_trace()
    if trace is None or not is_fake(tensor):
        raise createPoptorchError("You may only call getIpuTensorId on an IPU tensor", id="call")
    return trace.number_of(tensor)


def current_trace() -> Trace | None:
    """The trace that runs now; None outside of one."""
    return _current.get()


@contextmanager
def tracing(
    device: torch.device | str = "cpu", *, training: bool = False, shown: str = "ipu"
) -> Iterator[Trace]:
    """Run a model's code as its trace does: `isRunningOnIpu()`, devices and distributions.

    Args:
        device: the one that stands for the device "ipu".
        training: a program is made that trains.
        shown: the type of device that tensors of the trace show: "ipu", or that of `device`.
    """
    trace = Trace(training)
    token = _current.set(trace)
    validates = Distribution._validate_args
    with ExitStack() as stack:
        stack.callback(_current.reset, token)
        stack.callback(Distribution.set_default_validate_args, validates)
        Distribution.set_default_validate_args(False)  # it would read values of tensors
        stack.enter_context(numbering(trace.next_block_id))
        stack.enter_context(_autocast_on(torch.device(device).type))
        stack.enter_context(replaced(torch, "Generator", _Generator))
        if shown in _DEVICES:
            stack.enter_context(seen_on(_IPU, but_by=_LIBRARIES))
        stack.enter_context(_Devices(device, shown=shown in _DEVICES))
        yield trace


@contextmanager
def _autocast_on(device_type: str) -> Iterator[None]:
    """Let autocast of the device "ipu" be that of the device which computes."""

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(device_type if _is_ipu(value) else value for value in args)
            kwargs = {k: device_type if _is_ipu(v) else v for k, v in kwargs.items()}
            return function(*args, **kwargs)

        return in_this_thread(call, function)

    with ExitStack() as stack:
        for owner, name in _AUTOCAST:
            stack.enter_context(replaced(owner, name, real(getattr(owner, name))))
        yield


class _AnyGenerator(type):
    """The type of `_Generator`, which makes generators of PyTorch and takes them as its own."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _TORCH_GENERATOR("cpu" if _is_ipu(device) else device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _TORCH_GENERATOR)


class _Generator(metaclass=_AnyGenerator):
    """Replaces `torch.Generator` while a model is traced: it knows the device "ipu"."""


class _Devices(TorchFunctionMode):
    """Take moves to the device "ipu", or "xla", as done; refuse moves away from it, and other
    operators that PopTorch's device does not compute.

    Args:
        device: the one that stands for it.
        shown: tensors answer that they are on it.
    """

    def __init__(self, device: torch.device | str, *, shown: bool) -> None:
        super().__init__()
        self._device, self._shown = device, shown

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SHOWN and self._shown and is_fake(args[0]) and not _asked_by_libraries():
            return _SHOWN[func]
        if isinstance(kwargs.get("generator"), _TORCH_GENERATOR):
            raise createPoptorchError(
                f"{func.__name__} in forward draws on the device, which no generator of PyTorch "
                "reaches: leave the generator out, and seed with poptorch.Options().randomSeed",
                id="value",
            )
        if func is F.ctc_loss and kwargs.get("reduction") == "none":
            raise createPoptorchError(
                'CTCLoss with reduction="none" is currently not supported', id="loss"
            )
        to_cpu = func is Tensor.cpu or (
            func in (Tensor.to, Tensor.type) and _names_cpu(args, kwargs)
        )
        if to_cpu and not _calls_from(nn.utils.rnn):
            raise createPoptorchError(
                "Illegal move to CPU (via .to() or .cpu()): a value of the traced model is not "
                "known yet. Return it from the model, and look at it there",
                id="value",
            )
        if func is Tensor.to and len(args) == 2 and not kwargs and _is_ipu(args[1]):
            return args[0]
        if (place := _MASKED.get(func)) is not None:
            args = tuple(_as_bool(x) if i == place else x for i, x in enumerate(args))
            kwargs = {
                k: _as_bool(v) if k in ("mask", "condition") else v for k, v in kwargs.items()
            }
        device = self._device
        args = tuple(device if _is_ipu(argument) else argument for argument in args)
        return func(*args, **{k: device if _is_ipu(v) else v for k, v in kwargs.items()})


def _as_bool(mask: Any) -> Any:
    return mask.bool() if isinstance(mask, Tensor) and mask.dtype == torch.uint8 else mask


def _asked_by_libraries() -> bool:
    """Whether PyTorch or this package has made the call that is looked at."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES


def _is_ipu(argument: Any) -> bool:
    """Whether an argument names the device."""
    if isinstance(argument, torch.device):
        return argument.type in _DEVICES
    return isinstance(argument, str) and argument.partition(":")[0] in _DEVICES


def _names_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a move goes to "cpu", in so many words: `t.to(other.device)` stays on the device."""
    return "cpu" in [x for x in (*args[1:2], kwargs.get("device")) if isinstance(x, str)]


def _calls_from(module: ModuleType) -> bool:
    """Whether `module` of PyTorch made the call that is looked at: packed sequences' order is on
    the CPU in eager PyTorch, too."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals["__name__"].startswith(("ipu_dynamo.", "poptorch.")):
        frame = frame.f_back  # another mode
    return frame.f_globals is vars(module)

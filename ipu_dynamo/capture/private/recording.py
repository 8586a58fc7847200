"""Let PyTorch record operators with less Python; the graph is the same.

PyTorch looks up the whole stack of every operator, and keeps few of its lines. While it records an
operator, its own reads of tensors pass through the modes that replace the user's functions. This
file replaces names of PyTorch for a while; other threads still get the original behaviour. Checked
on PyTorch 2.13.0.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import proxy
from torch.fx.experimental import proxy_tensor

from ipu_dynamo.ops.private.replacing import TrueInThisThread, in_this_thread, replaced


@contextmanager
def shortened_recording() -> Iterator[None]:
    """Shorten the work of recording, in this thread and within the context."""
    stack = _ForwardFrames(vars(proxy)["CapturedTraceback"])
    with (
        replaced(proxy, "CapturedTraceback", stack),
        replaced(proxy_tensor, "proxy_call", _without_modes(proxy_tensor.proxy_call)),
        replaced(proxy_tensor, "track_tensor_tree", _asking(proxy_tensor.track_tensor_tree)),
    ):
        yield


class _ForwardFrames:
    """Stands in for PyTorch's class of stacks: gives those frames alone that it keeps.

    They are of functions called `forward`, of those that were registered, and of PyTorch's own
    module; PyTorch filters them once more.
    """

    def __init__(self, original: Any) -> None:
        self._original, self._is_here = original, TrueInThisThread()

    def extract(self, **arguments: Any) -> Any:
        if not self._is_here or arguments:
            return self._original.extract(**arguments)
        frames = []
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            name, file = code.co_name, code.co_filename
            if (
                name == "forward"
                or (file, name) in proxy._STACK_TRACE_ANCHORS
                or file.endswith("torch/__init__.py")
            ):
                frames.append(traceback.FrameSummary(file, frame.f_lineno, name))
            frame = frame.f_back  # type: ignore[assignment]
        return _Stack(frames)


class _Stack:
    """Frames, the innermost first."""

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self._frames = frames

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self._frames[::-1])


def _without_modes(original: Any) -> Any:
    """Record operators of PyTorch's own outside of the modes that replace functions.

    Operators of others stay within the modes: their shape functions are the user's code.
    """

    def proxy_call(mode: Any, func: Any, *arguments: Any) -> Any:
        if not isinstance(func, OpOverload) or func.namespace != "aten":
            return original(mode, func, *arguments)
        with torch._C.DisableTorchFunction():
            return original(mode, func, *arguments)

    return in_this_thread(proxy_call, original)


def _asking(original: Any) -> Any:
    """Read the metadata of tensors outside of the modes that replace functions."""

    def track_tensor_tree(*arguments: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return original(*arguments, **named)

    return in_this_thread(track_tensor_tree, original)

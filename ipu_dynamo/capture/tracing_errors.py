"""Add to an error during a trace the user's operator that raised it, and its arguments."""

import contextlib
import traceback
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor

from ipu_dynamo.errors import IpuError, is_library, raised_at
from ipu_dynamo.ops.private.graphs import pytree


def explain(error: Exception, names: Mapping[int, str]) -> None:
    """Note where an error of PyTorch was raised, and name the user's tensors in it.

    An error that the user's own code raised is not changed: its traceback ends at that line. Nor is
    an error of this package that has quoted a line.

    Args:
        names: of the model's inputs, parameters and buffers, by the identity of their stand-ins.
    """
    if error.args and isinstance(error.args[0], str):
        error.args = (error.args[0].replace("FakeTensor", "Tensor"), *error.args[1:])
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and not is_library(frames[-1].f_code.co_filename):
        return
    if isinstance(error, IpuError) and "\n  from: " in str(error):
        return
    error.add_note(f"while tracing {raised_at(error.__traceback__)}")
    if operator := _operator(frames, names):
        error.add_note(f"in {operator}")


def operator_of(error: Exception) -> str:
    """The name of the operator that the user's innermost line called when an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _operator(frames, {}).partition("(")[0]


def user_lines(trace: TracebackType | None) -> None:
    """Keep only the first entry of a traceback and the user's lines.

    If no line is the user's, keep all: the error is one of this project.
    """
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    shown = [entry for entry in entries[1:] if _is_users(entry)]
    if shown:
        for entry, following in zip([entries[0], *shown], [*shown, None], strict=True):
            entry.tb_next = following


def _is_users(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return not is_library(file) and not file.startswith("<string>") and file != contextlib.__file__


def _operator(frames: list[FrameType], names: Mapping[int, str]) -> str:
    """The operator that the innermost line of the user's called, with its arguments."""
    users = [i for i, frame in enumerate(frames) if not is_library(frame.f_code.co_filename)]
    local = frames[users[-1]].f_locals if users else {}
    known = {id(value): name for name, value in local.items()} | dict(names)
    for frame in frames[users[-1] + 1 if users else 0 :]:
        function, args = frame.f_locals.get("func"), frame.f_locals.get("args")
        if callable(function) and isinstance(args, tuple):
            values = pytree.tree_leaves((args, frame.f_locals.get("kwargs") or {}))
            name = getattr(function, "__name__", str(function))
            return f"{name}({', '.join(_text(value, known) for value in values)})"
    return ""


def _text(value: Any, names: Mapping[int, str]) -> str:
    """Print a value as an argument; a tensor as its name in the model, dtype and shape."""
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    name = names.get(id(value))
    return text if name is None else f"{name}: {text}"

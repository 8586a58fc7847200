"""Note each frame that Dynamo gives up for the backend "ipu", and the module that it was of.

The backend never sees such a frame. Dynamo's own record of it has no module, and modules of
PyTorch's classes run in common code. But Dynamo calls back at the end of each compilation, in its
thread and below `_compile`. The arguments of `_compile` have code, module and backend. Checked on
PyTorch 2.13.0.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, MethodType
from typing import Any
from weakref import ref

from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import _get_error_on_graph_break

from ipu_dynamo.errors import is_library

log = logging.getLogger(__name__)
COMMON: CodeType = wrap_inline(abs).__code__  # modules whose `forward` is PyTorch's run in it
_COMPILE = convert_frame._compile.__code__
_ARGUMENTS = {"code", "locals", "closure", "compiler_fn", "one_graph"}  # of `_compile`


@dataclass(frozen=True, slots=True)
class FailedFrame:
    """Dynamo gave a frame up.

    Args:
        where: a line of the model, as `model.py:12`; empty: not known.
        reason: one line.
        skipped: Python runs the code of the frame from now on; otherwise the error was raised.
        module: that the frame was of; None: it is of a function.
        kind: the class of the module.
    """

    where: str
    reason: str
    skipped: bool = True
    module: "ref[nn.Module] | None" = None
    kind: type | None = None


_Failures = dict[int, FailedFrame]  # by the module's id; the last one of each
_failed: dict[tuple[str, CodeType], _Failures] = {}  # equal code may be in another file
_collected: ContextVar[list[FailedFrame] | None] = ContextVar("ipu_dynamo_failed", default=None)
_tell: list[Callable[[FailedFrame], None]] = []


class _LastingCallbacks(list[Callable[[CallbackArgs], None]]):
    """Callbacks; `torch._dynamo.reset()`, which clears them, clears failures and leaves ours."""

    def clear(self) -> None:
        _failed.clear()
        self[:] = [_note]


def watch_failures(tell: Callable[[FailedFrame], None] | None = None) -> None:
    """Note failures from now on.

    Args:
        tell: is called with each frame that Dynamo skips.
    """
    if tell is not None and tell not in _tell:
        _tell.append(tell)
    if not isinstance(callback_handler.end_callbacks, _LastingCallbacks):
        callback_handler.end_callbacks = _LastingCallbacks([*callback_handler.end_callbacks, _note])


@contextmanager
def collected_failures() -> Iterator[list[FailedFrame]]:
    """Collect the failures in this block, of any backend, in place of noting them."""
    watch_failures()
    failures: list[FailedFrame] = []
    token = _collected.set(failures)
    try:
        yield failures
    finally:
        _collected.reset(token)


def failures_of(code: CodeType, module: nn.Module | None) -> list[FailedFrame]:
    """The failures of a code that a module has met.

    Without one, these are failures of another module of its class, as Dynamo then skips the code
    for all. PyTorch's own classes are left out: modules of them run in `COMMON`.

    Args:
        module: None: the code is a function's, and the modules that it is called on do not matter.
    """
    of_code = [*_failed.get((code.co_filename, code), {}).values()]
    own = [f for f in of_code if module is None or f.module is None or f.module() is module]
    if own or type(module).__module__.partition(".")[0] == "torch" or code == COMMON:
        return own
    return [
        replace(f, reason=f"{f.reason} (of another {f.kind.__name__}; PyTorch skips it for all)")
        for f in of_code
        if f.skipped and f.kind is not None and f.kind is type(module)
    ]


def is_ours(backend: Any) -> bool:
    """Whether `torch.compile` got the backend "ipu"."""
    return getattr(backend, "compiler_name", "") == "ipu"


def _note(args: CallbackArgs) -> None:
    """Note a failure, or that there is none any more; Dynamo calls this after each compilation."""
    error, collected = sys.exception(), _collected.get()
    frame, below = _compilation()
    if frame is None or args.callback_trigger is not CallbackTrigger.DYNAMO:
        return
    given = frame.f_locals
    if not given.keys() >= _ARGUMENTS:
        return
    if collected is None and not is_ours(innermost_backend(given["compiler_fn"])):
        return
    code, module = given["code"], _module_of(given["code"], given["locals"], given["closure"])
    key = code.co_filename, code
    if error is None or not _ends(error, below):
        if collected is None:
            _failed.get(key, {}).pop(id(module), None)
        return
    failure = FailedFrame(
        _where(error, code, frame.f_back),
        str(error).partition("\n")[0],
        _is_skipped(error, one_graph=given["one_graph"]),
        None if module is None else ref(module),
        None if module is None else type(module),
    )
    if collected is not None:
        collected.append(failure)
        return
    of_code = _failed.setdefault(key, {})
    for number in [n for n, f in of_code.items() if not f.skipped and f.module and not f.module()]:
        del of_code[number]  # an error of a module that is gone
    of_code[id(module)] = failure
    for tell in _tell if failure.skipped else ():
        try:
            tell(failure)
        except Warning as warning:  # Dynamo would count this compilation as running for good
            log.warning("%s", warning)


def _is_skipped(error: BaseException, *, one_graph: bool) -> bool:
    """Whether Python runs the frame, and the user sees no error."""
    soft = isinstance(error, Unsupported | UserError)
    return soft and not one_graph and not _get_error_on_graph_break()


def _compilation() -> tuple[FrameType | None, list[FrameType]]:
    """The call of `_compile` in this thread, and the calls below it."""
    below: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _COMPILE:
        below.append(frame)
        frame = frame.f_back
    return frame, below


def _ends(error: BaseException, calls: list[FrameType]) -> bool:
    """Whether an error was raised in one of these calls; otherwise a caller of them handles it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame not in calls:
        trace = trace.tb_next
    return trace is not None


def _module_of(code: CodeType, names: dict[str, Any], closure: Any) -> nn.Module | None:
    """The module that a frame runs."""
    owner: Any
    if code == COMMON:
        owner = closure[code.co_freevars.index("fn")].cell_contents
        owner = owner.__self__ if isinstance(owner, MethodType) else owner
    else:  # the rest of a frame after a break has other first arguments
        first = code.co_varnames[0] if code.co_argcount else ""
        owner = names.get("self", names.get(first))
    return owner if isinstance(owner, nn.Module) else None


def _where(error: BaseException, code: CodeType, caller: FrameType | None) -> str:
    """The innermost line of the user's: in the frame, or one that has called it."""
    stack = reversed(getattr(error, "real_stack", None) or ())
    lines = [(line.filename, line.lineno) for line in stack]
    lines = lines or [(code.co_filename, code.co_firstlineno)]
    innermost = lines[0]
    while caller is not None:
        lines.append((caller.f_code.co_filename, caller.f_lineno))
        caller = caller.f_back
    file, line = next((one for one in lines if not is_library(one[0])), innermost)
    return f"{Path(file).name}:{line}"

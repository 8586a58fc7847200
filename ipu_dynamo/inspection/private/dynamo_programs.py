"""Find what Dynamo has compiled for a function or module. Checked on PyTorch 2.13.0."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import (
    OptimizedModule,
    _debug_get_cache_entry_list,
    innermost_backend,
)
from torch._dynamo.external_utils import wrap_inline

from ipu_dynamo.capture.private.failed_frames import COMMON, FailedFrame, failures_of, is_ours

_COMPILED, _RESUMED = "__compiled_fn", "__resume_at"  # globals of compiled code begin so


def unwrapped(x: Any) -> Any:
    """The module or function in what `torch.compile` returned; others as they are."""
    if isinstance(x, OptimizedModule):
        return x._orig_mod
    while (inner := getattr(x, "_torchdynamo_orig_callable", None)) is not None:
        x = inner
    return x


class CompiledFrames:
    """The frames of a function or module that Dynamo may compile.

    Args:
        x: a module, or a function, wrapped by `torch.compile` or not.

    Attributes:
        callables: the backend's results that PyTorch calls now. For each, whether other modules
            have the same frame: all those have whose `forward` PyTorch defines.
        failures: why Dynamo gave frames up, of these objects: see `failures_of`.
    """

    def __init__(self, x: Any) -> None:
        self._seen: set[tuple[CodeType, nn.Module | None]] = set()
        self._followed: set[tuple[FunctionType, nn.Module | None]] = set()  # some name themselves
        self.callables: dict[Any, bool] = {}
        self.failures: list[FailedFrame] = []
        self._follow(unwrapped(x), None)

    def _follow(self, x: Any, module: nn.Module | None) -> None:
        """Collect the frames of a function, of functions in its closure, and of functions that
        they call after a graph break."""
        if isinstance(x, nn.Module):
            module = unwrapped(x)
            forward = getattr(type(module), "forward", None)
            if isinstance(module.forward, MethodType):
                forward = module.forward.__func__
            if isinstance(forward, FunctionType):
                self._follow(forward, module)
            self._code(COMMON, {**vars(torch._dynamo.external_utils)}, module)
            for child in module.children():
                self._follow(child, child)
            return
        if isinstance(x, MethodType):
            owner = x.__self__ if isinstance(x.__self__, nn.Module) else module
            self._follow(x.__func__, owner)
        elif isinstance(x, FunctionType) and (x, module) not in self._followed:
            self._followed.add((x, module))
            self._code(x.__code__, x.__globals__, module)
            for cell in x.__closure__ or ():
                try:
                    inside = cell.cell_contents
                except ValueError:  # it is empty
                    continue
                if isinstance(inside, FunctionType | MethodType):
                    self._follow(inside, module)

    def _code(self, code: CodeType, names: dict[str, Any], module: nn.Module | None) -> None:
        if (code, module) in self._seen:
            return
        self._seen.add((code, module))
        self.failures += failures_of(code, module)
        resumed = []
        for entry in _debug_get_cache_entry_list(code):
            for name in entry.code.co_names:
                value = names.get(name)
                if name.startswith(_COMPILED):
                    self.callables.setdefault(unwrapped(value), code is COMMON)
                elif name.startswith(_RESUMED) and value is not None:
                    resumed.append(value)
        for function in resumed:  # the rest of a frame after a break
            self._code(function.__code__, function.__globals__, module)
        for name in code.co_names:  # functions that it may call in Python
            value = getattr(type(module), name, None) if module is not None else None
            value = names.get(name) if value is None else value
            if isinstance(value, FunctionType) and not _is_torch(value):
                self._follow(value, module)


def _is_torch(function: Callable[..., Any]) -> bool:
    return function.__module__.partition(".")[0] == "torch"


@contextmanager
def compiled_anew(x: Any, backend: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Compile a module or function as if it never was before, and leave its compilations alone.

    Its own frame is compiled as a copy; those that it calls where it breaks are not.
    """
    x = unwrapped(x)
    if isinstance(x, nn.Module):
        forward = x.forward
        if not isinstance(forward, MethodType) or _is_torch(forward.__func__):
            yield torch.compile(_copied(wrap_inline(x)), backend=backend)
            return
        had = "forward" in vars(x)
        x.forward = MethodType(_copied(forward.__func__), forward.__self__)
        try:
            yield torch.compile(x, backend=backend)
        finally:
            if had:
                x.forward = forward
            else:
                del x.forward
    elif isinstance(x, MethodType):
        yield torch.compile(MethodType(_copied(x.__func__), x.__self__), backend=backend)
    elif isinstance(x, FunctionType):
        yield torch.compile(_copied(x), backend=backend)
    else:
        yield torch.compile(x, backend=backend)


def _copied(function: Any) -> Any:
    """A function of the same code, which Dynamo takes for another's."""
    code, names = function.__code__.replace(), function.__globals__
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy


def options_of(x: Any) -> Any:
    """The options that `torch.compile(x, backend="ipu")` got; None: none, or it was not called."""
    context = getattr(x, "dynamo_ctx", None)
    if context is None and isinstance(x, FunctionType):
        names = x.__code__.co_freevars
        cells = dict(zip(names, x.__closure__ or (), strict=True))
        context = cells["self"].cell_contents if "self" in cells else None
    backend: Any = innermost_backend(getattr(context, "callback", None))  # type: ignore[arg-type]
    return backend.kwargs.get("options") if is_ours(backend) else None

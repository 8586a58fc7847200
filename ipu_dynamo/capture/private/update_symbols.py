"""Run an optimiser's Python on stand-ins: numbers are symbols, decisions become guards.

This file has all private names of PyTorch that this needs. Checked on PyTorch 2.13.0.
"""

import builtins
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis

from ipu_dynamo.capture.private.recording import shortened_recording
from ipu_dynamo.ops.private.graphs import tracing_here
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

Symbol = (torch.SymFloat, torch.SymInt, torch.SymBool)
DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)


class _Mode(FakeTensorMode):
    """Remembers what results of operators look like where neither values nor symbols are known.

    PyTorch's memory has neither: from it there would come no value, and no guard.
    """

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        leaves = [*_leaves(args), *_leaves(kwargs.values())]
        unknown = any(isinstance(x, FakeTensor) and x.real_tensor is None for x in leaves)
        if unknown and not any(isinstance(x, Symbol) for x in leaves):
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        return self._dispatch_impl(func, types, args, kwargs)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments of an operator, and the elements of lists among them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


class StandIns:
    """The stand-ins of one tracing.

    Attributes:
        mode: of fake tensors, whose sizes stay numbers.
    """

    def __init__(self) -> None:
        self._env = ShapeEnv()
        self.mode = _Mode(shape_env=self._env, allow_non_fake_inputs=True)
        # `item` of a known 0-dim tensor may decide, as a guard
        self.mode.propagate_real_tensors = True

    def number(self, value: float | int, name: str) -> Any:
        """A symbol for a number. `create_symbol` would merge equal ones, and make 0 and 1 fixed."""
        env, source = self._env, ConstantSource(name)
        symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        make = env.create_symfloatnode if type(value) is float else env.create_symintnode
        return make(symbol, hint=value, source=source)

    def tensor(self, tensor: Tensor, *, known: bool) -> Tensor:
        """A stand-in for a tensor; Python may decide by the value of one that is `known`."""
        with _disable_current_modes():
            own = tensor.detach().clone() if known else tensor.detach()
        fake = self.mode.from_tensor(own, static_shapes=True)
        if known:
            fake.real_tensor = own
        return fake

    def conditions(self) -> list[tuple[Any, str]]:
        """The conditions that this trace relies on, as expressions over symbols, with lines."""
        env = self._env
        found = [(guard.expr, _line_of(guard)) for guard in env.guards]
        asserts = env.deferred_runtime_asserts.values()
        return found + [(one.expr, str(one.msg)) for of in asserts for one in of]


def _line_of(guard: Any) -> str:
    return str(guard.sloc).strip()


def symbol_of(value: Any) -> Any:
    """The expression of a symbol as it was made; guards may have simplified `.expr`."""
    return value.node._expr


def free_symbols(expression: Any) -> frozenset[str]:
    """The names of the symbols in an expression."""
    return frozenset(str(symbol) for symbol in expression.free_symbols)


class _Conditions(TensorReferenceAnalysis):
    """Computes expressions with tensors; adds the functions that PyTorch leaves out."""

    @staticmethod
    def python_mod(a: Tensor, b: Tensor) -> Tensor:
        return torch.remainder(a, b)

    mod = python_mod  # type: ignore[assignment]  # there it raises

    @staticmethod
    def int_truediv(a: Tensor, b: Tensor) -> Tensor:
        return torch.true_divide(a.to(torch.float64), b.to(torch.float64))

    @staticmethod
    def trunc(a: Tensor) -> Tensor:
        return torch.trunc(a)


def as_tensor(expression: Any, values: Mapping[str, Tensor]) -> Tensor:
    """The value of an expression, from 0-dim tensors for its symbols."""
    symbols = {symbol: values[str(symbol)] for symbol in expression.free_symbols}
    result: Tensor = sympy_interp(_Conditions, symbols, expression)
    return result


class _Kept(TorchFunctionMode):
    """Keeps what would bake a number into the graph, or lose a write, without a word."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _set_data():
            args[0].copy_(args[1])
            return None
        if func in (torch.tensor, torch.as_tensor) and _is_number(args[0]):
            like = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
            integer = isinstance(args[0], int | torch.SymInt)
            like.setdefault("dtype", torch.int64 if integer else torch.get_default_dtype())
            return torch.full((), args[0], **like)
        if func in _SUBTRACTIONS and isinstance(kwargs.get("alpha"), Symbol):
            name = "add_" if func is Tensor.sub_ else "add"  # `sub` would ask whether alpha is 1
            return getattr(args[0], name)(args[1], alpha=-kwargs["alpha"])
        return func(*args, **kwargs)


def _set_data() -> Any:
    """The setter of `tensor.data`, which is another object each time."""
    attribute: Any = Tensor.data
    return attribute.__set__


_SUBTRACTIONS = (torch.sub, Tensor.sub, Tensor.sub_)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, *Symbol)


_torch: Any = torch  # whose stubs do not have these
_FUNCTIONS = {
    "sqrt": _torch._sym_sqrt,
    "cos": _torch._sym_cos,
    "sin": _torch._sym_sin,
    "tan": _torch._sym_tan,
    "acos": _torch._sym_acos,
    "asin": _torch._sym_asin,
    "atan": _torch._sym_atan,
    "cosh": _torch._sym_cosh,
    "sinh": _torch._sym_sinh,
    "tanh": _torch._sym_tanh,
    "log2": _torch._sym_log2,
}


def _symbolic(own: Callable[..., Any], of_symbols: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Symbol) for arg in args):
            return of_symbols(*args, **kwargs)
        return own(*args, **kwargs)

    return function


def _smallest(own: Callable[..., Any], symbols: Any, tensors: Any) -> Callable[..., Any]:
    """`min` or `max` of two, of which one may be a symbol or a fake tensor."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs or not any(isinstance(arg, (*Symbol, Tensor)) for arg in args):
            return own(*args, **kwargs)
        if any(isinstance(arg, Tensor) for arg in args):
            first, second = (_tensor(arg) for arg in args)
            return tensors(first, second)
        return symbols(*args)

    return function


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value)


# The functions of tensors that graphs have for these.
SYMBOLIC_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    function: getattr(torch, name) for name, function in _FUNCTIONS.items()
}
_COMPOSED: dict[str, Callable[..., Any]] = {
    "exp": lambda x: math.e**x,
    "pow": lambda x, y: x**y,
    "log": lambda x, base=math.e: _torch._sym_log2(x) / math.log2(base),
    "log10": lambda x: _torch._sym_log2(x) / math.log2(10),
}


@contextmanager
def symbolic_functions() -> Iterator[None]:
    """Let Python's functions of numbers take symbols, in this thread."""
    with ExitStack() as stack:
        for name, of_symbols in (_FUNCTIONS | _COMPOSED).items():
            own = getattr(math, name)
            new = in_this_thread(_symbolic(own, of_symbols), own)
            stack.enter_context(replaced(math, name, new))
        for name, of_symbols, of_tensors in (
            ("min", torch.sym_min, torch.minimum),
            ("max", torch.sym_max, torch.maximum),
        ):
            own = getattr(builtins, name)
            new = _smallest(own, of_symbols, of_tensors)
            stack.enter_context(replaced(builtins, name, in_this_thread(new, own)))
        yield


def record(run: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Record the operators of `run` on stand-ins, with its in-place writes.

    Stacks are not recorded. PyTorch looks all of them up, and keeps frames of functions named
    `forward` only. An optimiser's step has none.
    """
    return _traced(run, values)


def without_writes(module: fx.GraphModule, values: Sequence[Any]) -> fx.GraphModule:
    """The same with values in place of writes. Views stay: as copies they would cost."""
    run = torch.func.functionalize(
        lambda *args: fx.Interpreter(module).run(*args), remove="mutations"
    )
    return _traced(run, values)


def _traced(run: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    tracer = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)
    with tracing_here(), shortened_recording():
        return tracer(*values)


def recording(stand_ins: StandIns) -> ExitStack:
    """Enter the modes in which an optimiser can run on stand-ins."""
    stack = ExitStack()
    stack.enter_context(_quiet())
    stack.enter_context(torch.no_grad())
    stack.enter_context(stand_ins.mode)
    return stack


def inside() -> ExitStack:
    """Enter the modes that the recorded function needs."""
    stack = ExitStack()
    stack.enter_context(_Kept())
    stack.enter_context(symbolic_functions())
    return stack


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings that known values were used to decide: they become guards."""
    names = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled

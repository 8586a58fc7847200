"""Replace the numbers of a recorded step by tensors: the functions of a program take tensors only.

Before   %lerp = aten.lerp.Scalar(%m, %g, %sub);   %sub = 1.0 - %beta, a Python number
After    %lerp = aten.lerp.Tensor(%m, %g, %s);     %s = aten.to(%sub, float32), %sub: f64[]
Keeps    values: a number is float64 or int64 until it meets a tensor, whose dtype it takes then; it
         promotes nothing. Weights and states in half precision are computed in float32 and rounded
         once, at their last write. Decisions of Python by numbers become b8[] results.
Source   torch.compile's own pass of this name, which does it for models.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode, pytree, to_fake
from ipu_dynamo.capture.private.update_symbols import SYMBOLIC_FUNCTIONS, as_tensor, record
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.capture.update.trace_step import (
    HOST,
    RecordedStep,
    UntraceableUpdate,
    explained,
)
from ipu_dynamo.capture.update.world import Leaf
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update_levels import UpdateGraphs, UpdateStep
from ipu_dynamo.program import graph_outputs

_HALVES = (torch.float16, torch.bfloat16)


class UnknownNumberUse(CompileError):
    """An operator takes a number that is not known as a tensor."""

    id = "update"


@dataclass(frozen=True, slots=True)
class PythonNumber:
    """A Python number of a step: f64[], i64[] or b8[]."""

    tensor: Tensor


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in _HALVES


def _upcast(tensor: Tensor) -> Tensor:
    """A tensor in half precision as float32, others as they are."""
    return tensor.float() if _is_half(tensor) else tensor


class NumbersAsTensors(fx.Interpreter):
    """Runs a traced step on tensors only.

    Args:
        halves: weights or states are in half precision, and are given as float32.

    Attributes:
        items: the value of each tensor that the step has read as a number, in order.
    """

    def __init__(self, module: fx.GraphModule, *, halves: bool) -> None:
        super().__init__(module)
        self._halves = halves
        self.items: list[Tensor] = []
        self._node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = str(target)
        if name.startswith("profiler."):
            return None
        if target is aten._local_scalar_dense.default:
            number = args[0].to(_number_dtype(args[0].dtype))
            self.items.append(number)
            return PythonNumber(number)
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, PythonNumber) for leaf in leaves):
            return _by_tensors(target, args, kwargs)
        recorded = self._node.meta.get("val") if self._node is not None else None
        if target in _OF_NUMBERS:
            return PythonNumber(_of_numbers(target, args, recorded))
        # in float32 and rounded once, as operators do with numbers: one rounded to half is another
        args, kwargs = pytree.tree_map_only(Tensor, _upcast, (args, kwargs))
        result = _with_numbers(target, args, kwargs)
        return _as_recorded(result, recorded, halves=self._halves)


def _number_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.bool:
        return torch.bool
    return torch.float64 if dtype.is_floating_point else torch.int64


def _as_recorded(result: Any, recorded: Any, *, halves: bool) -> Any:
    """In the dtype that eager has; where weights are `halves`, these stay float32."""
    if isinstance(result, Tensor) and isinstance(recorded, Tensor):
        half = halves and recorded.dtype in _HALVES
        return result.to(torch.float32 if half else recorded.dtype)
    if isinstance(result, list) and isinstance(recorded, list | tuple):
        pairs = zip(result, recorded, strict=True)
        return [_as_recorded(*pair, halves=halves) for pair in pairs]
    return result


# --- Numbers and numbers --------------------------------------------------------------------------

_OF_NUMBERS: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
    operator.pow: torch.pow,
    pow: torch.pow,
    operator.neg: torch.neg,
    operator.pos: torch.positive,
    operator.abs: torch.abs,
    operator.eq: torch.eq,
    operator.ne: torch.ne,
    operator.lt: torch.lt,
    operator.le: torch.le,
    operator.gt: torch.gt,
    operator.ge: torch.ge,
    torch.sym_float: torch.positive,
    torch.sym_int: torch.trunc,
    torch.sym_not: torch.logical_not,
    torch.sym_max: torch.maximum,
    torch.sym_min: torch.minimum,
    **SYMBOLIC_FUNCTIONS,
}


def _of_numbers(target: Any, args: Sequence[Any], recorded: Any) -> Tensor:
    tensors = [arg.tensor if isinstance(arg, PythonNumber) else _constant(arg) for arg in args]
    comparison = isinstance(recorded, bool | torch.SymBool)
    real = isinstance(recorded, float | torch.SymFloat) or any(
        t.dtype == torch.float64 for t in tensors
    )
    if real:
        tensors = [tensor.to(torch.float64) for tensor in tensors]
    result = _OF_NUMBERS[target](*tensors)
    if comparison:
        return result
    return result.to(torch.float64 if isinstance(recorded, float | torch.SymFloat) else torch.int64)


def _constant(value: Any) -> Tensor:
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.full((), value, dtype=dtype)


# --- Numbers and tensors --------------------------------------------------------------------------


def _met(value: Any, tensor: Tensor) -> Any:
    """A number in the dtype of the tensor that it meets."""
    if not isinstance(value, PythonNumber):
        return value
    dtype = tensor.dtype
    if not dtype.is_floating_point and value.tensor.dtype == torch.float64:
        dtype = torch.get_default_dtype()
    return value.tensor.to(dtype)


def _scaled(value: Any, alpha: Any, like: Tensor) -> Any:
    value = _met(value, like)
    if isinstance(alpha, PythonNumber):
        return value * _met(alpha, value if isinstance(value, Tensor) else like)
    return value if alpha == 1 else value * alpha


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    like = x if isinstance(x, Tensor) else y
    return torch.add(_met(x, like), _scaled(y, alpha, like))


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    like = x if isinstance(x, Tensor) else y
    return torch.sub(_met(x, like), _scaled(y, alpha, like))


def _rsub(x: Tensor, y: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(_met(y, x), _scaled(x, alpha, x))


def _both(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def applied(x: Any, y: Any, **kwargs: Any) -> Tensor:
        like = x if isinstance(x, Tensor) else y
        return function(_met(x, like), _met(y, like), **kwargs)

    return applied


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    product: Tensor = _met(value, x) * a * b
    return x + product


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    quotient: Tensor = _met(value, x) * a / b
    return x + quotient


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    total: Tensor = x * _met(beta, x) + (a @ b) * _met(alpha, x)
    return total


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    limits = [
        None if v is None else torch.as_tensor(_met(v, x), dtype=x.dtype) for v in (low, high)
    ]
    return torch.clamp(x, *limits)


def _full(size: Sequence[int], value: PythonNumber, *, dtype: Any = None, **_: Any) -> Tensor:
    if dtype is None:
        real = value.tensor.dtype == torch.float64
        dtype = torch.get_default_dtype() if real else torch.int64
    return value.tensor.to(dtype).expand(list(size)).clone()


def _full_like(x: Tensor, value: PythonNumber, *, dtype: Any = None, **_: Any) -> Tensor:
    return torch.zeros_like(x, dtype=dtype) + value.tensor.to(dtype or x.dtype)


def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    like = x if isinstance(x, Tensor) else y
    return torch.where(condition, _met(x, like), _met(y, like))


_TENSOR_USES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _both(torch.mul),
    "div": _both(torch.div),
    "pow": _both(torch.pow),
    "remainder": _both(torch.remainder),
    "eq": _both(torch.eq),
    "ne": _both(torch.ne),
    "lt": _both(torch.lt),
    "le": _both(torch.le),
    "gt": _both(torch.gt),
    "ge": _both(torch.ge),
    "maximum": _both(torch.maximum),
    "minimum": _both(torch.minimum),
    "lerp": lambda a, b, weight: torch.lerp(a, b, _met(weight, a)),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "addmm": _addmm,
    "addmv": _addmm,
    "baddbmm": _addmm,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "full": _full,
    "full_like": _full_like,
    "fill": _full_like,
    "scalar_tensor": lambda value, **kwargs: _full((), value, **kwargs),
    "masked_fill": lambda x, mask, value: torch.where(mask, _met(value, x), x),
    "where": _where,
}


OPERATORS_OF_NUMBERS = frozenset(_TENSOR_USES)  # that take a number that changes from step to step


def _with_numbers(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = _name(target)
    if (short := name.removeprefix(_FOREACH)) not in _TENSOR_USES:
        raise UnknownNumberUse(f"{target} takes a number that may change from step to step")
    if name.startswith(_FOREACH):
        return _of_lists(_TENSOR_USES[short], args, kwargs)
    return _TENSOR_USES[name](*args, **kwargs)


# --- Lists of tensors -----------------------------------------------------------------------------

_FOREACH = "_foreach_"
_OF_EACH: dict[str, Callable[..., Any]] = {  # operators of one tensor differ under these names
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "maximum": lambda x, y: (torch.maximum if isinstance(y, Tensor) else torch.clamp_min)(x, y),
    "copy": lambda x, y, non_blocking=False: aten.copy.default(x, y, non_blocking),
    "zero": torch.zeros_like,
    "minimum": lambda x, y: (torch.minimum if isinstance(y, Tensor) else torch.clamp_max)(x, y),
}


def _name(target: Any) -> str:
    return str(target).removeprefix("aten.").split(".")[0]


def _by_tensors(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator; call one on lists tensor by tensor.

    The tensors of a list belong to several parameters, and each parameter has its own function.
    """
    name = _name(target)
    short = name.removeprefix(_FOREACH)
    of_one = _OF_EACH.get(short) or getattr(torch, short, None)
    if short == name or of_one is None:
        return target(*args, **kwargs)
    if short in _WITH_VALUE and len(args) > 3 and isinstance(args[3], Tensor):
        of_one, args = _TENSOR_USES[short], [*args[:3], list(args[3].unbind())]
    return _of_lists(of_one, args, kwargs)


_WITH_VALUE = ("addcmul", "addcdiv")  # whose fourth argument is one of one tensor by name only


def _of_lists(
    of_one: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Call an operator of one tensor for each tensor of the lists, as `torch._foreach_*` does."""
    count = next(len(arg) for arg in args if isinstance(arg, list | tuple))
    found = []
    for i in range(count):
        row = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
        by_name = {"value": row[3], **kwargs} if len(row) > 3 else kwargs
        found.append(of_one(*row[:3], **by_name))
    return found


# --- A step ---------------------------------------------------------------------------------------


def _tensorified(step: RecordedStep) -> UpdateStep:
    mode, world = fake_mode(), step.world
    count = len(world.parameters)
    recorded = [node.meta["val"] for node in graph_outputs(step.graph)]
    parameters = [to_fake(mode, p.detach()) for p in world.parameters]
    with mode:
        gradients = [_upcast(p).clone() for p in parameters]
        leaves = [_input(leaf, mode) for leaf in step.taken]
    tensors = [*world.parameters, *(leaf.value for leaf in step.taken if leaf.is_tensor)]
    halves = any(map(_is_half, tensors))

    def run(*values: Tensor) -> list[Tensor]:
        numbers = values[2 * count :]
        given: list[Any] = [_upcast(value) for value in values[: 2 * count]]
        for leaf, value in zip(step.taken, numbers, strict=True):
            given.append(PythonNumber(value) if leaf.is_number else _upcast(value))
        interpreter = NumbersAsTensors(step.graph, halves=halves)
        results = interpreter.run(*given)
        made = [
            _result(value, like, weight=place < count)
            for place, (value, like) in enumerate(zip(results, recorded, strict=True))
        ]
        return [*made, *_conditions(step, given, interpreter.items)]

    with torch.no_grad(), mode:
        try:
            graph = record(run, [*parameters, *gradients, *leaves])
        except Exception as error:
            raise explained(error, world) from error
    return UpdateStep(step, graph)


def _input(leaf: Leaf, mode: Any) -> Tensor:
    if leaf.is_number:
        dtype = torch.float64 if type(leaf.value) is float else torch.int64
        return torch.empty((), dtype=dtype)
    fake: Tensor = to_fake(mode, leaf.value.detach())
    return fake


def _result(value: Any, like: Any, *, weight: bool) -> Tensor:
    if isinstance(value, PythonNumber):
        return value.tensor
    assert isinstance(value, Tensor)
    return value if weight else value.to(like.dtype)


def _conditions(step: RecordedStep, given: Sequence[Any], items: Sequence[Tensor]) -> list[Tensor]:
    values = {
        symbol: given[place].tensor if place >= 0 else items[-1 - place]
        for symbol, place in step.symbols.items()
        if place < 0 or isinstance(given[place], PythonNumber)
    }
    made = []
    for expression, line in step.kept_conditions:
        try:
            made.append(as_tensor(expression, values).to(torch.bool))
        except Exception as error:
            problem = f"the optimizer decides by {expression}, which no program can keep"
            raise UntraceableUpdate(problem, where=line, hint=HOST) from error
    return made


class TensorifyScalars(Pass):
    """The pass.

    Raises:
        UntraceableUpdate: a condition cannot be kept.
        UnknownNumberUse: a number is used in a way that is not known.
    """

    level = "recorded"
    needed = "functions take tensors only"

    def __call__(self, update: RecordedUpdate) -> UpdateGraphs:
        steps = tuple(map(_tensorified, update.steps))
        return UpdateGraphs(update.worlds, update.stands, steps)

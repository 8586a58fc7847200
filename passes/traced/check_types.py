"""Refuse operators that have no kernel for the types they are given, by the names of the inputs.

Before   %y = aten.linear(%x: i64[m,k], %w: f32[n,k])  # traces, and fails when it runs
After    raise CompileError("cannot compute with input x, which is torch.int64")
Keeps    the graph. An operator is refused only if it fails on these types and does not on float32.
Source   PyTorch: fake tensors have shapes and types, but do not know which kernels exist.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Placeholder, Traced
from ipu_dynamo.capture.private.tracing import autocast_again, autocasts, outside_modes
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.graph_queries import may_draw
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.kit import Pass

_MOST = 2**20  # elements of a trial, which takes a millisecond then
_FAILURES = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)
_order = attrgetter("name")


@dataclass(frozen=True, slots=True)
class WrongTypes:
    """An operator that does not take the types of its arguments.

    Args:
        arguments: those that it would take as float32.
        problem: what PyTorch says.
    """

    node: fx.Node
    arguments: tuple[fx.Node, ...]
    problem: str


def plan(graph: fx.Graph) -> Iterator[WrongTypes]:
    """Try every operator once for each combination of types that PyTorch may refuse."""
    tried: set[str] = set()
    for node, within in autocasts(graph):
        if not _may_be_refused(node):
            continue
        switches = [switch.args for switch in within]
        key = str((node.target, map_arg((node.args, node.kwargs), _described), switches))
        if key not in tried:
            tried.add(key)
            with autocast_again(within):
                wrong = _try(node)
            if wrong is not None:
                yield wrong


class CheckTypes(Pass):
    """The pass."""

    level = "traced"

    def __call__(self, capture: Traced) -> bool:
        roles = capture.roles()
        for wrong in plan(capture.graph.graph):
            what = " and ".join(_named(argument, roles) for argument in wrong.arguments)
            operator = str(wrong.node.target).removesuffix(".default")
            raise CompileError(
                f"{operator} cannot compute with {what}: {wrong.problem}",
                node=wrong.node,
                hint="convert it first, as with x.float(), or pass floating-point numbers",
                id="types",
            )
        return False


def _may_be_refused(node: fx.Node) -> bool:
    """Whether an operator of PyTorch mixes types, or has integers, and is small enough to try."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    if may_draw(node):
        return False
    values = [v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), Tensor)]
    if not values or len(values) < len(node.all_input_nodes):
        return False
    if any(value.device.type != "cpu" or value.is_complex() for value in values):
        return False
    exact = [not value.is_floating_point() for value in values]
    if not any(exact) and len({value.dtype for value in values}) == 1:
        return False
    return _is_pointwise(node) or _elements([*values, node.meta.get("val")]) <= _MOST


def _elements(values: list[Any]) -> int:
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _described(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{value.dtype}{list(value.shape)}"


def _try(node: fx.Node) -> WrongTypes | None:
    """Run an operator on zeros and on ones; where it fails, on float32 in place of other types."""
    arguments = sorted({n for n in node.all_input_nodes if _is_other(n)}, key=_order)
    problem = _failure(node, ())
    if problem is None:
        return None
    for blamed in (*((argument,) for argument in arguments), tuple(arguments)):
        if _failure(node, blamed) is None:
            return WrongTypes(node, blamed, problem)
    return None  # it fails for another reason: the run raises that error


def _is_other(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype != torch.float32)


def _failure(node: fx.Node, as_float: tuple[fx.Node, ...]) -> str | None:
    """Return PyTorch's error for an operator on these types and any values; None: it runs."""
    problem = ""
    for fill in (0, 1):  # 0 is an index that always exists, and 1 a divisor
        try:
            with outside_modes(), torch.no_grad():
                examples = {n: _example(n, fill, as_float, node) for n in node.all_input_nodes}
                args, kwargs = map_arg((node.args, dict(node.kwargs)), examples.__getitem__)
                node.target(*args, **kwargs)  # type: ignore[operator]
        except _FAILURES as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        else:
            return None
    return problem


def _example(node: fx.Node, fill: int, as_float: tuple[fx.Node, ...], user: fx.Node) -> Tensor:
    value = node.meta["val"]
    dtype = torch.float32 if node in as_float else value.dtype
    if _is_pointwise(user):
        return torch.full([1] * value.dim(), fill, dtype=dtype)
    return torch.full(value.shape, fill, dtype=dtype)


def _named(node: fx.Node, roles: Mapping[fx.Node, Placeholder]) -> str:
    """A value by the input, parameter or buffer that it is, or comes from with its type."""
    dtype, source, steps = node.meta["val"].dtype, node, 0
    while source not in roles:
        same = [n for n in source.all_input_nodes if _dtype(n) == dtype]
        if not same:
            return f"a value of {dtype} ({source_line(node)})"
        source, steps = same[0], steps + 1
    role = roles[source]
    what = f"{role.kind} {role.name}"
    return f"{what}, which is {dtype}" if not steps else f"what comes from {what}, in {dtype}"


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)

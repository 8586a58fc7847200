"""Refuse loops and branches whose bodies do not fit: unknown ones, or of other types."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.control_flow import branch_op, loop_op, names_of
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.types import TensorType

Types = list[TensorType]


def check_bodies(functions: Sequence[Function]) -> None:
    """Check every loop and branch of functions, which come after the bodies that they run.

    Raises:
        ValueError: what is wrong, and the line of the model.
    """
    before: dict[str, Function] = {}
    for function in functions:
        for node in function.operators:
            if names := names_of(node):
                try:
                    _check(node, [_named(before, name) for name in names])
                except ValueError as error:
                    problem = f"%{node.name} in @{function.name}: {error}\n  {source_line(node)}"
                    raise ValueError(problem) from error
        before[function.name] = function


def _named(functions: dict[str, Function], name: str) -> Function:
    if name not in functions:
        raise ValueError(f"no function before it is called {name}")
    return functions[name]


def _check(node: fx.Node, functions: Sequence[Function]) -> None:
    if [body.name for body in bodies_of(node)] != [function.name for function in functions]:
        raise ValueError("it does not hold the bodies that it names")
    results = [_type(value) for value in node.meta["val"]]
    args: tuple[Any, ...] = node.args
    if node.target is branch_op:
        _predicate(_type(args[0].meta["val"]))
        for function in functions:
            _same(f"@{function.name} takes", list(function.inputs), _all(args[1]))
            _same(f"@{function.name} returns", _results(function), results)
        return
    body = functions[-1]
    carried, captured = _all(args[0]), _all(args[1 if node.target is not loop_op else 2])
    rows: Types = []
    stacked: Types = []
    if node.target is loop_op:
        count = args[3]
        for scanned in _all(args[1]):
            if scanned.shape[:1] != (count,):
                raise ValueError(f"{count} iterations read rows of {scanned}")
            rows.append(TensorType(scanned.dtype, scanned.shape[1:]))
        for result in _results(body)[len(carried) :]:
            stacked.append(TensorType(result.dtype, (count, *result.shape)))
    else:
        holds = functions[0]
        _same(f"@{holds.name} takes", list(holds.inputs), [*carried, *captured])
        _same("a condition returns", _results(holds), [_predicate(*_results(holds)[:1])])
    _same(f"@{body.name} takes", list(body.inputs), [*carried, *rows, *captured])
    _same(f"@{body.name} carries on", _results(body)[: len(carried)], carried)
    _same("it gives", results, [*carried, *stacked])


def _predicate(type_: TensorType | None = None) -> TensorType:
    if type_ is None or type_.dtype != torch.bool or type_.shape.count(1) != len(type_.shape):
        raise ValueError(f"a condition is one bool, and this is {type_}")
    return type_


def _results(function: Function) -> Types:
    if None in function.outputs:
        raise ValueError(f"@{function.name} returns None")
    return [result for result in function.outputs if result is not None]


def _all(nodes: Sequence[fx.Node]) -> Types:
    return [_type(node.meta["val"]) for node in nodes]


def _type(value: Any) -> TensorType:
    if not isinstance(value, Tensor):
        raise ValueError(f"{value!r} is no tensor")
    return TensorType.of(value)


def _same(what: str, actual: Types, expected: Types) -> None:
    if actual != expected:
        first, other = (", ".join(map(str, types)) for types in (actual, expected))
        raise ValueError(f"{what} ({first}), and ({other}) is expected")

"""Compute small expressions over numbers and arrays by walking their syntax, never by `eval`.

Literals, lists, tuples, arithmetic, comparisons, subscripts, and the functions in `array_calls.py`.
Sizes are known before anything is allocated: integers have 64 bits, lists 65,536 elements and
arrays 2**28 bytes at most.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ipu_dynamo.saved_model.feeds.array_calls import (
    CONSTANTS,
    FUNCTIONS,
    GENERATOR_METHODS,
    METHODS,
    call,
    to_array,
)
from ipu_dynamo.saved_model.feeds.limits import (
    DEEPEST,
    LONGEST,
    Refused,
    check_array_bytes,
    check_integer,
    check_length,
)

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_NUMBERS = (bool, int, float)
_ERRORS = (ArithmeticError, ValueError, TypeError, IndexError, MemoryError)


def evaluate(text: str) -> Any:
    """The value of an expression, as numpy computes it.

    Raises:
        ValueError: a part is not in the grammar, or beyond a limit; it is quoted.
    """
    text = text.strip()
    if len(text) > LONGEST:
        raise Refused(text[:40], f"an expression of more than {LONGEST} characters")
    _check_brackets(text)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Refused(text[:80], f"no expression ({error})") from error
    try:
        with np.errstate(all="ignore"):
            return _Walk(text).value(tree, 1)
    except Refused:
        raise
    except _ERRORS as error:
        raise Refused(text[:80], _said(error)) from error


def _check_brackets(text: str) -> None:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise Refused(text[:40], f"brackets nested more than {DEEPEST} deep")


class _Walk:
    """Computes the nodes of one text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _part(self, node: ast.AST) -> str:
        return (ast.get_source_segment(self._text, node) or type(node).__name__)[:80]

    def _refused(self, node: ast.AST, why: str) -> Refused:
        return Refused(self._part(node), why)

    def value(self, node: ast.expr, depth: int) -> Any:
        if depth > DEEPEST:
            raise self._refused(node, f"an expression more than {DEEPEST} deep")
        try:
            result = self._value(node, depth + 1)
        except Refused:
            raise
        except OverflowError as error:
            raise self._refused(
                node, f"a number too large for its type ({_said(error)})"
            ) from error
        except _ERRORS as error:
            raise self._refused(node, _said(error)) from error
        return check_integer(result, self._part(node))

    def _value(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.List(elts=parts):
                return [self.value(part, depth) for part in parts]
            case ast.Tuple(elts=parts):
                return tuple(self.value(part, depth) for part in parts)
            case ast.UnaryOp(op=op, operand=operand):
                return _UNARY[type(op)](self._arithmetic(operand, depth))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._binary(
                    node, type(op), self.value(left, depth), self.value(right, depth)
                )
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                pair = self._arithmetic(left, depth), self._arithmetic(right, depth)
                self._check_broadcast(node, *pair)
                return _COMPARE[type(op)](*pair)
            case ast.Subscript(value=value, slice=index):
                return self._subscript(node, self.value(value, depth), self._index(index, depth))
            case ast.Attribute():
                return self._attribute(node, depth)
            case ast.Call():
                return self._call(node, depth)
        raise self._refused(
            node, "it is no number, list or function of np, as in x=np.ones((2, 3))"
        )

    def _arithmetic(self, node: ast.expr, depth: int) -> Any:
        value = self.value(node, depth)
        if not isinstance(value, (*_NUMBERS, np.generic, np.ndarray)):
            raise self._refused(node, f"no arithmetic with a {type(value).__name__}")
        return value

    def _binary(self, node: ast.expr, kind: type[ast.AST], left: Any, right: Any) -> Any:
        sequences = [isinstance(value, list | tuple) for value in (left, right)]
        if any(sequences):
            part = self._part(node)
            if kind is ast.Add and all(sequences):
                check_length(len(left) + len(right), part)
            elif kind is ast.Mult and any(isinstance(value, int) for value in (left, right)):
                items, count = (left, right) if sequences[0] else (right, left)
                check_length(len(items) * max(count, 0), part)
            elif any(isinstance(value, np.ndarray) for value in (left, right)):
                left, right = to_array(left, part), to_array(right, part)
                self._check_broadcast(node, left, right, product=kind is ast.MatMult)
            else:
                raise self._refused(node, "no arithmetic with lists")
            return _BINARY[kind](left, right)
        numbers = all(
            isinstance(value, (*_NUMBERS, np.generic, np.ndarray)) for value in (left, right)
        )
        if not numbers:
            raise self._refused(node, "no arithmetic with values of this kind")
        if kind is ast.Pow and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right
            if right > 0 and abs(left) > 1 and bits - right > 64:
                raise self._refused(node, "an integer of more than 64 bits")
        self._check_broadcast(node, left, right, product=kind is ast.MatMult)
        return _BINARY[kind](left, right)

    def _check_broadcast(
        self, node: ast.expr, left: Any, right: Any, *, product: bool = False
    ) -> None:
        a, b = np.shape(left), np.shape(right)
        if product and a and b:
            shape: tuple[int, ...] = np.broadcast_shapes(a[:-2], b[:-2]) + a[-2:-1] + b[1:][-1:]
        else:
            shape = np.broadcast_shapes(a, b)
        check_array_bytes(shape, 16 if _is_wide(left, right) else 8, self._part(node))

    def _index(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.Slice(lower=lower, upper=upper, step=step):
                parts = [None if p is None else self.value(p, depth) for p in (lower, upper, step)]
                if any(not isinstance(part, int | np.integer | None) for part in parts):
                    raise self._refused(node, "a slice of something else than integers")
                return slice(*parts)
            case ast.Tuple(elts=parts):
                return tuple(self._index(part, depth) for part in parts)
            case ast.Constant(value=value) if value is Ellipsis:
                return Ellipsis
        return self.value(node, depth)

    def _subscript(self, node: ast.expr, value: Any, index: Any) -> Any:
        if isinstance(value, np.ndarray):
            parts = index if isinstance(index, tuple) else (index,)
            chosen = [
                to_array(i, self._part(node)) for i in parts if isinstance(i, list | np.ndarray)
            ]
            # each index takes the place of a dimension, and all of them are one broadcast shape
            shape = np.broadcast_shapes(*(part.shape for part in chosen if part.dtype != bool))
            count = max(math.prod(shape), 1)
            check_array_bytes((count, value.size), value.itemsize, self._part(node))
        elif not isinstance(value, list | tuple) or isinstance(index, tuple):
            raise self._refused(node, f"no subscript of a {type(value).__name__}")
        return value[index]

    def _attribute(self, node: ast.Attribute, depth: int) -> Any:
        name = _dotted(node)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if node.attr == "T" and not name.startswith("np."):
            value = self.value(node.value, depth)
            if isinstance(value, np.ndarray | np.generic):
                return value.T
        raise self._refused(node, "no name of the list of expressions")

    def _call(self, node: ast.Call, depth: int) -> Any:
        args = [self.value(argument, depth) for argument in node.args]
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._refused(keyword.value, "`**` is not in the grammar of expressions")
            kwargs[keyword.arg] = self.value(keyword.value, depth)
        name = _dotted(node.func)
        if name in FUNCTIONS:
            return call(FUNCTIONS[name], args, kwargs, self._part(node))
        if f"np.{name}" in FUNCTIONS:
            raise self._refused(
                node.func, f"no function of the list of expressions; write np.{name}"
            )
        if isinstance(node.func, ast.Attribute) and not name.startswith("np."):
            owner = self.value(node.func.value, depth)
            table = GENERATOR_METHODS if isinstance(owner, np.random.Generator) else METHODS
            wanted = np.random.Generator if table is GENERATOR_METHODS else np.ndarray | np.generic
            if node.func.attr in table and isinstance(owner, wanted):
                return call(table[node.func.attr], [owner, *args], kwargs, self._part(node))
        raise self._refused(node.func, "no function of the list of expressions")


def _dotted(node: ast.AST) -> str:
    """`np.random.rand` of the attributes of a name; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_wide(*values: Any) -> bool:
    return any(isinstance(value, np.ndarray) and value.dtype.itemsize > 8 for value in values)

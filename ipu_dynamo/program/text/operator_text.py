"""Write an operator of a graph as a line for people: `%y: f32[4,2] = aten.mm(%x, %w)`."""

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.program.ir.types import TensorType


def operator_text(node: fx.Node) -> str:
    """A call with the type of its result."""
    return f"{value_text(node)} = {_call_text(node)}"


def value_text(node: fx.Node) -> str:
    """The name of a value, with its type if it is a tensor."""
    value = node.meta.get("val")
    type_ = f": {TensorType.of(value)}" if isinstance(value, torch.Tensor) else ""
    return f"%{node.name}{type_}"


def operator_label(node: fx.Node) -> str:
    """The name of a node's operator: `aten.mm`; `get_attr` if it reads an attribute."""
    target = node.target
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target.__name__}".removesuffix(".default")
    if node.op == "get_attr":
        return node.op
    return str(target) if not callable(target) else getattr(target, "__name__", str(target))


class _Reference(str):
    """A numbered value that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _call_text(node: fx.Node) -> str:
    args = map_arg((node.args, dict(node.kwargs)), lambda n: _Reference(f"%{n.name}"))
    parts = [repr(a) for a in args[0]] + [f"{k}={v!r}" for k, v in args[1].items()]
    name = str(node.target) if node.op == "get_attr" else operator_label(node)
    return f"{name}({', '.join(parts)})"

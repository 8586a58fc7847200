"""Compute operators on halves in float32, and round their results.

The machine computes in half precision: marks give its dtype, see `machine_marks.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.graph.builder import become, call, keep_plan
from ipu_dynamo.program.machine_marks import MACHINE, NOTHING, in_dtype


@dataclass
class InFloat:
    """The rewrite of one graph, operator by operator in graph order.

    Invariant: `upcasts` has one conversion of a value for each stage and direction, so that values
    sent between stages stay half as large.
    """

    graph: fx.Graph
    names: Mapping[fx.Node, str]
    upcasts: dict[tuple[fx.Node, Any, Any], fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, capture: Joint) -> "InFloat":
        names = {node: role.name for node, role in capture.roles().items()}
        return cls(capture.graph.graph, names)

    def rewrite(self, node: fx.Node) -> None:
        with self.graph.inserting_before(node):
            args = map_arg(node.args, lambda n: self.upcast(n, node))
            kwargs = map_arg(dict(node.kwargs), lambda n: self.upcast(n, node))
            args, kwargs = map_aggregate((args, kwargs), _wide_dtype)
            name = f"{node.name}_f32"
            result = call(self.graph, node.target, *args, origin=node, name=name, **kwargs)
        keep_plan(node, result)
        mark = node.meta.get(MACHINE)
        result.meta[MACHINE] = in_dtype(mark, torch.float16)
        if mark != NOTHING:
            node.meta.pop(MACHINE, None)  # it becomes a cast, which the machine does not run
        if isinstance(result.meta["val"], Tensor):
            become(node, aten._to_copy.default, result, dtype=torch.float16)
            return
        for part in list(node.users):
            assert part.target is getitem, "only parts of several results can be read"
            with self.graph.inserting_before(part):
                name = f"{part.name}_f32"
                value = call(self.graph, getitem, result, part.args[1], origin=part, name=name)
            if part.meta["val"].is_floating_point() and not is_half(part):
                value.meta[MACHINE] = in_dtype(part.meta.get(MACHINE), part.meta["val"].dtype)
            if part.meta["val"].dtype == torch.float16:
                become(part, aten._to_copy.default, value, dtype=torch.float16)
            else:
                part.replace_all_uses_with(value)
                self.graph.erase_node(part)
        self.graph.erase_node(node)

    def upcast(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        if not is_half(source):
            return source
        key = source, reader.meta.get(STAGE), reader.meta.get(BACKWARD)
        if key not in self.upcasts:
            self.upcasts[key] = call(
                self.graph,
                aten._to_copy.default,
                source,
                dtype=torch.float32,
                origin=reader,
                name=f"{self.names.get(source, source.name)}_f32",
            )
            self.upcasts[key].meta[MACHINE] = in_dtype(None, torch.float16)
        return self.upcasts[key]


def is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.float16


def _wide_dtype(argument: Any) -> Any:
    """Return float32 for an operator's dtype argument that is float16, else the argument."""
    return torch.float32 if argument is torch.float16 else argument

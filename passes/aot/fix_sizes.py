"""Put numbers in place of symbolic sizes, in values and arguments; the capture has fixed them.

Before   %s: Sym[s] = input
         %y = aten.view(%x: f32[4*s], [%s, 4])
After    %y: f32[s,4] = aten.view(%x: f32[4*s], [s, 4])
Keeps    values, source lines, inputs. A size that depends on the values of a tensor is refused.
Source   programs have static shapes.
"""

from functools import partial
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.capture.private.dynamo import static, unbacked_symbols
from ipu_dynamo.capture.unplaceable import refuse_sizes_from_values
from ipu_dynamo.passes.kit import GraphPass


class FixSizes(GraphPass):
    """The pass."""

    level = "joint"
    needed = "programs have static shapes"

    def rewrite(self, capture: Joint) -> bool:
        return _fix(capture.graph.graph)


def _fix(graph: fx.Graph) -> bool:
    """Fix values and arguments; say whether any was symbolic."""
    known: set[str] = set()
    unknown: list[fx.Node] = []
    changed = False
    for node in list(graph.nodes):
        before = node.meta.get("val")
        value = static(before)
        if node.op != "placeholder" or isinstance(value, Tensor):
            node.meta["val"] = value
            changed |= value is not before
        if value is None and before is not None:
            new = unbacked_symbols(before) - known
            known |= new
            unknown += [node] if new else []
        if isinstance(value, int | float):
            changed |= bool(node.users)
            for user in list(node.users):
                swap = partial(_swap, node, value)
                user.args, user.kwargs = map_arg((user.args, dict(user.kwargs)), swap)
            if node.op != "placeholder":
                graph.erase_node(node)
                changed = True
    refuse_sizes_from_values(unknown)
    return changed


def _swap(node: fx.Node, value: float, argument: fx.Node) -> Any:
    return value if argument is node else argument

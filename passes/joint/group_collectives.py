"""Give each collective its groups of replicas, and remove collectives that exchange nothing.

With     replicas=4
Before   %h = ipu.all_gather(%x: f32[2,3], 4, 0, False, False)
         %y = ipu.all_reduce_gradient(%h, 0, 2, True)
         %z = ipu.all_reduce(%y, 0, 2, True)
After    %h = ipu.all_gather(%x: f32[2,3], 4, 4, False, False)
         %z = ipu.all_reduce(%h, 4, 2, True)
Keeps    everything else. Every collective that is left has the number of replicas of the program,
         and the size of its groups.
Source   design of this project; PopTorch's collectives of replicas.
"""

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.library.replica_collectives import (
    COLLECTIVES,
    Exchanged,
    all_gather_op,
    all_reduce_gradient_op,
    all_to_all_op,
)
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import become, replace
from ipu_dynamo.passes.kit import GraphPass

_ALL = (*COLLECTIVES, all_reduce_gradient_op)


class GroupCollectives(GraphPass):
    """The pass.

    Args:
        replicas: of the program; None: it has none, as through torch.compile.
        phased: its stages are in phases.
    """

    level = "joint"
    acts_on = _ALL
    needed = "collectives of replicas are no operators of functions"

    replicas: int | None = None
    phased: bool = False

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return contents.bodies or super().applies(capture, contents)

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        changed = False
        for node in list(graph.nodes):
            if node.target in _ALL:
                changed |= self._group(node)
            elif _within(node):
                raise CompileError(
                    "the body of a loop or branch exchanges tensors between replicas",
                    node=node,
                    hint="write the loop out, or exchange the tensors before or after it",
                    id="collective",
                )
        return changed

    def _group(self, node: fx.Node) -> bool:
        x, replicas, size, orthogonal = Exchanged.of(node)
        size = self._size(node, replicas, size)
        if node.target is all_to_all_op:
            shape = x.meta["val"].shape
            if not shape or shape[0] % size:
                raise CompileError(
                    f"a tensor of shape {list(shape)} cannot be divided between {size} replicas",
                    node=node,
                    hint=f"its first dimension has to be a multiple of {size}",
                    id="collective",
                )
        if node.target is all_gather_op and size == 1:
            become(node, aten.unsqueeze.default, x, 0)
            return True
        if node.target is all_reduce_gradient_op or size == 1:
            replace(node, x)
            node.graph.erase_node(node)
            return True
        grouped = x, self.replicas, size, orthogonal, *node.args[4:]
        changed = grouped != node.args
        node.args = grouped
        return changed

    def _size(self, node: fx.Node, replicas: int, size: int) -> int:
        if self.replicas is None or self.phased:
            where = "through torch.compile" if self.replicas is None else "in phases"
            raise CompileError(
                f"replicas cannot exchange tensors {where}",
                node=node,
                hint="compile the model with ipu_dynamo.compile_training or compile_inference"
                if self.replicas is None
                else "choose a pipelined or sharded strategy",
                id="collective",
            )
        if replicas not in (0, self.replicas):
            raise CompileError(
                f"it exchanges tensors between {replicas} replicas, and the program has "
                f"{self.replicas}",
                node=node,
                hint=f"set replicas={replicas} in the options, or change the model",
                id="collective",
            )
        size = size or self.replicas
        if self.replicas % size:
            raise CompileError(
                f"{self.replicas} replicas cannot be divided into groups of {size}",
                node=node,
                hint="choose groups whose size divides the number of replicas",
                id="collective",
            )
        return size


def _within(node: fx.Node) -> bool:
    """Whether a body that a node runs has collectives."""
    return any(
        inner.target in _ALL or _within(inner)
        for body in bodies_of(node)
        for inner in body.graph.graph.nodes
    )

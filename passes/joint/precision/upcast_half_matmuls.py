"""Multiply halves in float32 and round the result once, on processors without half arithmetic.

So do operators for which PyTorch has no kernel on halves at all.

Before   %y = aten.mm(%a: f16[m,k], %b: f16[k,n])
After    %c = aten._to_copy(%a, dtype=torch.float32)
         %d = aten._to_copy(%b, dtype=torch.float32)
         %p = aten.mm(%c, %d)
         %c, %d, %p  with meta["ipu.machine"] = "f16"
         %y = aten._to_copy(%p, dtype=torch.float16)
Keeps    stages and source lines; results, but for the order of the sum: both forms add in float32
         and round once. Other devices than the CPU multiply halves themselves.
Source   a product of two halves is exact in float32. PyTorch 2.13 multiplies halves on the CPU at a
         tenth of the speed of float32, in the shapes of the backward pass at a thirtieth.
"""

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.upcast import InFloat, is_half
from ipu_dynamo.passes.kit import GraphPass

PRODUCTS = frozenset(
    {
        aten.addbmm.default,
        aten.addmm.default,
        aten.addmv.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.dot.default,
        aten.mm.default,
        aten.mv.default,
    }
)

_NO_HALF_KERNEL = frozenset(
    {
        aten._cdist_backward.default,
        aten._cdist_forward.default,
        aten._pdist_backward.default,
        aten._pdist_forward.default,
        aten.avg_pool3d.default,
        aten.avg_pool3d_backward.default,
    }
)


def plan(graph: fx.Graph) -> list[fx.Node]:
    """The products and other operators on halves on the CPU. Reads the graph only."""
    return [
        node
        for node in graph.nodes
        if node.target in PRODUCTS | _NO_HALF_KERNEL
        and any(is_half(n) and n.meta["val"].device.type == "cpu" for n in node.all_input_nodes)
    ]


class UpcastHalfMatmuls(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = PRODUCTS | _NO_HALF_KERNEL

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return contents.halves and super().applies(capture, contents)

    def rewrite(self, capture: Joint) -> bool:
        products = plan(capture.graph.graph)
        rewrite = InFloat.of(capture)
        for product in products:
            rewrite.rewrite(product)
        return bool(products)

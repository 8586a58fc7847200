"""Print on the host: let tensors that a model prints leave the program by streams of their own.

Before   %h = aten.exp(%x: f32[n])
         %p = ipu.print_tensor(%h, "h", True, 9, 3, 80, 4, "auto", ",", "(", ")")
         %y = aten.relu(%p)
After    %h = aten.exp(%x)
         %y = aten.relu(%h)
         return (%y, %h)
         capture.report.prints = {
             "1": Printing("h", TensorFormat(9, 3, 80, 4, "auto", ",", "(", ")"))
         }
Keeps    every other operator. Streams have the order in which one micro-batch prints.
Source   PopTorch user guide, "poptorch.ipu_print_tensor".
"""

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.print_tensor import Printing, print_tensor_op
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.kit import GraphPass


class PrintTensors(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = (print_tensor_op,)
    needed = "workers would print in any order"

    def rewrite(self, capture: Joint) -> bool:
        prints = plan(capture.graph.graph)
        for node in prints:
            stream = capture.return_value(_printed(node))
            capture.report.prints = {**capture.report.prints, stream: Printing.of(node)}
        for node in prints:
            node.replace_all_uses_with(node.all_input_nodes[0])
            capture.graph.graph.erase_node(node)
        return bool(prints)


def plan(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Find the prints, in order. Reads the graph only."""
    return tuple(graph.find_nodes(op="call_function", target=print_tensor_op))


def _printed(node: fx.Node) -> fx.Node:
    """Return the value to print; for a variable or input a copy, on the stage that prints it."""
    (source,) = node.all_input_nodes
    if source.op != "placeholder":
        return node
    with node.graph.inserting_before(node):
        return call(node.graph, aten.clone.default, source, origin=node)

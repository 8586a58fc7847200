"""Find the operator of a function that raises."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.program import Function
from ipu_dynamo.runtime.engines.eager_code import failed_in


class _Finder(fx.Interpreter):
    """Run a graph node by node on copies, to learn which node raises."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> object:
        self.last = n
        return super().run_node(n)


def failing_operator(
    function: Function, error: Exception, arguments: Sequence[Tensor] | None
) -> fx.Node | None:
    """The operator whose call raised `error`.

    The eager engine's code says which it was. For compiled code the function is run once more, on
    copies of its arguments; None when that succeeds, or the arguments are gone.
    """
    node, graphs = None, [function.graph]
    for name in failed_in(error):
        nodes = [n for graph in graphs for n in graph.graph.nodes if n.name == name]
        node = next(iter(nodes), node)
        graphs = [body.graph for n in nodes for body in bodies_of(n)]
    if node is None and arguments is not None:
        node = _first_to_fail(function, arguments)
    return node


def _first_to_fail(function: Function, arguments: Sequence[Tensor]) -> fx.Node | None:
    finder = _Finder(function.graph)
    try:
        with torch.no_grad():
            finder.run(*[argument.clone() for argument in arguments])
    except Exception:  # the search is over: this is the failure that it looks for
        return finder.last
    return None

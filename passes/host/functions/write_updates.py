"""Let the function of a traced update write weight and states, which the program has as results.

Before   (%weight', %state') = @piece(%weight, %gradient, %state, %factor)
After    aten.copy_(%weight, %weight'); aten.copy_(%state, %state'), behind everything else
Keeps    what both hold afterwards. The compiler stores results over its inputs: no copy of them is
         held. A weight that is rounded at random stays a result.
Source   the updates of torch.optim, which are in place.
"""

from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Function, graph_outputs, make_function


def _writing(function: Function, *, keep_weight: bool) -> Function:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(function.graph.graph, copies)
    results = [copies[node] for node in graph_outputs(function.graph)]
    weight, _, *rest = (n for n in graph.nodes if n.op == "placeholder")
    targets = [weight, *rest[: len(results) - 1]]
    kept = []
    for place, (target, result) in enumerate(zip(targets, results, strict=True)):
        if place == 0 and keep_weight:
            kept.append(result)
            continue
        node = graph.call_function(aten.copy_.default, (target, _direct(result, target)))
        node.meta["val"] = target.meta["val"]
    graph.output(tuple(kept)).meta["val"] = None
    graph.eliminate_dead_code()
    return make_function(f"{function.name}_in_place", fx.GraphModule(function.graph, graph))


def _direct(result: fx.Node, target: fx.Node) -> fx.Node:
    """Return a result's own target if the result is a copy of it, else the result."""
    if result.target is aten.clone.default and result.args[0] is target:
        return target
    return result


class WriteUpdates(Pass):
    """The pass.

    Args:
        keep_weight: return the new weight, and do not write it.
    """

    level = "function"
    needed = "the results of an update would be lost"

    keep_weight: bool = False

    def __call__(self, function: Function) -> Function:
        return _writing(function, keep_weight=self.keep_weight)

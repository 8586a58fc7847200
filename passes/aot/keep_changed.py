"""Keep values read from a tensor that the model changes, for the backward pass.

Before   %m: f32[n] = buffer  with meta["desc"] = BufferAOTInput("m")
         %t: f32[n] = tangent  with meta["desc"] = TangentAOTInput(PlainAOTOutput(0))
         %y = aten.exp(%m)     with meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
         %n = aten.add(%m, %y)
         %g = aten.mul(%t, %y)
         %r = InputMutationAOTOutput(BufferAOTInput("m"))
         return (mutation(%m, %n), %g)  with meta["desc"] = [%r, None]
After    %c = aten.clone(%m)   with meta["recompute"] = CheckpointPolicy.MUST_SAVE
         %y = aten.exp(%c)     with meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
         %n = aten.add(%m, %y)
         %g = aten.mul(%t, %y)
         %n                    with meta["recompute"] = CheckpointPolicy.MUST_SAVE
Keeps    results, shapes, dtypes, source lines. Gradients are those of the forward pass as it ran.
Source   `torch.utils.checkpoint`. Batch normalisation in training is the common case: autograd
         would refuse the changed statistics.
"""

from collections.abc import Collection, Iterable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.capture.private.aot import InputMutationAOTOutput, TangentAOTInput
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import depending_on, is_view
from ipu_dynamo.ops.private.node_meta import DESC, POLICY
from ipu_dynamo.passes.aot.keep_draws import AGAIN
from ipu_dynamo.passes.kit import GraphPass


class KeepChanged(GraphPass):
    """The pass, on a joint graph that is to be cut in two."""

    level = "joint"
    needed = "the backward pass would read what the model has changed"

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        inputs = changed_inputs(graph)
        readers, kept_values = plan(graph, inputs), unrepeatable(graph, inputs)
        for node in kept_values:
            node.meta[POLICY] = CheckpointPolicy.MUST_SAVE
        for node, again in readers.items():
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                kept = graph.call_function(aten.clone.default, (node,))
            kept.meta = again[0].meta | {
                "val": node.meta["val"],
                POLICY: CheckpointPolicy.MUST_SAVE,
            }
            for user in again:
                user.replace_input_with(node, kept)
        return bool(readers or kept_values)


def changed_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that the model changes: AOTAutograd describes inputs and results."""
    results = graph.output_node().meta[DESC]
    changed = [it.mutated_input for it in results if isinstance(it, InputMutationAOTOutput)]
    return [node for node in graph.find_nodes(op="placeholder") if node.meta[DESC] in changed]


def plan(graph: fx.Graph, changed: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Find the reads of `changed` inputs that checkpoints repeat in backward. Changes nothing."""
    backward = after_tangents(graph)
    readers = {
        node: [user for user in node.users if _is_needed_again(user, backward)] for node in changed
    }
    return {node: again for node, again in readers.items() if again}


def unrepeatable(graph: fx.Graph, changed: Iterable[fx.Node]) -> list[fx.Node]:
    """Forward operators that read a `changed` input, or a view of it: by the time of the backward
    pass it holds something else. Reads the graph only."""
    backward = after_tangents(graph)
    users: list[fx.Node] = []
    pending = list(changed)
    while pending:
        for user in pending.pop().users:
            if is_view(user):
                pending.append(user)
            elif user.op != "output" and user not in backward and POLICY not in user.meta:
                users.append(user)
    return users


def after_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The gradients that a graph of AOTAutograd gets, and all that is computed from them."""
    inputs = graph.find_nodes(op="placeholder")
    return depending_on(node for node in inputs if isinstance(node.meta.get(DESC), TangentAOTInput))


def _is_needed_again(node: fx.Node, backward: Collection[fx.Node]) -> bool:
    return node.meta.get(POLICY) in AGAIN and not depending_on([node]).isdisjoint(backward)

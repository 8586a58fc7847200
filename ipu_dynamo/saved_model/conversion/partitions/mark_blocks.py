"""Put the operators of a partition on several IPUs, in the order in which they take turns.

Before   %a, %b, %c of one partition, with an IPU for each
After    ipu.begin_block("0", 0); %a; ipu.begin_block("1", 1); %b; ...
Keeps    values; every operator stays behind those that it reads. What another block reads is a
         copy: a view, of which the graph need not know that it is one, has no memory to be sent.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": manual_sharding.
"""

from collections.abc import Mapping

from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.markers import begin_block
from ipu_dynamo.saved_model.conversion.drafts.node_groups import name_of


def mark_blocks(graph: fx.Graph, ipus: Mapping[str, int]) -> None:
    """Rewrite `graph` so that few changes of the IPU are needed.

    Args:
        ipus: of every operator, by canonical name.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    turns: dict[fx.Node, int] = {}
    for node in calls:
        ipu = ipus[name_of(node)]
        turns[node] = max(
            (
                turns[source] + (ipus[name_of(source)] != ipu)
                for source in node.all_input_nodes
                if source in turns
            ),
            default=0,
        )
    order = sorted(calls, key=lambda node: (turns[node], ipus[name_of(node)]))  # stable
    places = {node: (turns[node], ipus[name_of(node)]) for node in calls}
    output, block = graph.output_node(), None
    for node in order:
        place = places[node]
        if place != block:
            with graph.inserting_before(output):
                graph.call_function(begin_block, (f"turn {place[0]} of IPU {place[1]}", place[1]))
            block = place
        output.prepend(node)
    for node in order:
        readers = [user for user in node.users if places.get(user, places[node]) != places[node]]
        if readers and isinstance(node.meta["val"], Tensor):
            with graph.inserting_after(node):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            for reader in readers:
                reader.replace_input_with(node, copy)
    graph.lint()

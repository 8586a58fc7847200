"""Find a place for what is written once in a step: where the variables are that it is made of.

Before   stage 0: %n = aten.mul(%v, %g)             and reads %g and %m nowhere else
         stage 1: ipu.write_at_step_end(%m, aten.lerp(%m, %g, 0.1))
After    stage 0: both
Keeps    values: variables are the same all through a step, whichever stage reads them.
Source   the operator ExpMovAvg of published programs for PopTorch, which runs behind the pipeline.
         A block that it is called in says where a layer is; a hook of that layer which computes its
         weight (`weight_norm`) runs before the block begins, on the IPU before.
"""

from collections.abc import Collection, Mapping

from torch import fx

from ipu_dynamo.ops.marks.step_end import write_at_step_end_op

_Rank = tuple[int, int]  # placement.py's: what stages are sorted by


def plan(
    graph: fx.Graph,
    ranks: Mapping[fx.Node, _Rank],
    ipus: Mapping[_Rank, int],
    variables: Collection[fx.Node],
) -> dict[fx.Node, _Rank]:
    """New ranks for operators that serve writes at the end of a step alone. Reads the graph only.

    A write stays where it is if it is made of what another stage computes, or of variables that
    several IPUs read, or that nothing else reads.

    Args:
        ranks: of all operators; what comes first is less.
        ipus: of each rank.
        variables: parameters and buffers, which one IPU may read.
    """
    serving = {
        write: _serving(write, ranks)
        for write in graph.find_nodes(op="call_function", target=write_at_step_end_op)
    }
    all_serving = {node for nodes in serving.values() for node in nodes}
    moved: dict[fx.Node, _Rank] = {}
    for nodes in serving.values():
        sources = {source for node in nodes for source in node.all_input_nodes} - nodes
        if any(source.op not in ("placeholder", "get_attr") for source in sources):
            continue
        readers = [user for v in sources & set(variables) for user in v.users]
        places = [ranks[r] for r in readers if r in ranks and r not in all_serving]
        if len({ipus[rank] for rank in places}) == 1:
            moved |= dict.fromkeys(nodes, min(places))
    return moved


def _serving(write: fx.Node, ranks: Collection[fx.Node]) -> set[fx.Node]:
    """The write, and the operators whose results it alone reads."""
    nodes, waiting = {write}, list(write.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in ranks and node not in nodes and nodes.issuperset(node.users):
            nodes.add(node)
            waiting += node.all_input_nodes
    return nodes

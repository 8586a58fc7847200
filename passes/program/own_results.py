"""Give a value that is written to a variable its own memory, if it shares that of another value.

Before   (%t) = backward0(%g): t = aten.t(%mm), and %mm is a result, too; t is written
After    (%t) = backward0(%g): t = aten.clone(aten.t(%mm))
Keeps    every value. Where a function is joined with its writes, the copy goes: `InlineWrites`.
Source   design of this project: functions are pure, and the values that they write share no memory.
"""

from collections.abc import Collection

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import root
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Part, Partitioned
from ipu_dynamo.program import OWN_MEMORY, graph_outputs


class OwnResults(Pass):
    """The pass."""

    level = "parts"
    needed = "a function would write to what another value lies in"

    def applies(self, partitioned: Partitioned, contents: Contents) -> bool:
        return any(part.writes for part in partitioned.parts)

    def __call__(self, partitioned: Partitioned) -> bool:
        read = partitioned.reads
        changed = [_own(part, read) for part in partitioned.parts]
        return any(changed)


def plan(part: Part, read: Collection[str]) -> tuple[int, ...]:
    """Return positions of results that only writes read, in memory of an input or other result.

    Args:
        read: names that parts read, or that are returned.
    """
    written = {write.value for write in part.writes}
    results = graph_outputs(part.graph)
    only = [i for i, name in enumerate(part.outputs) if name in written and name not in read]
    taken = {root(node) for i, node in enumerate(results) if i not in only and node is not None}
    shared = []
    for position in only:
        base = root(results[position])
        if base.op == "placeholder" or base in taken:
            shared.append(position)
        taken.add(base)
    return tuple(shared)


def _own(part: Part, read: Collection[str]) -> bool:
    positions = plan(part, read)
    if not positions:
        return False
    graph = part.graph.graph
    output = graph.output_node()
    results = list(graph_outputs(part.graph))
    for position in positions:
        results[position] = _copy(graph, results[position])
    output.args = (tuple(results),)
    part.graph.recompile()
    return True


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    behind = node
    while behind.op == "placeholder" and behind.next.op == "placeholder":
        behind = behind.next
    with graph.inserting_before(behind.next):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta = {key: node.meta[key] for key in (BACKWARD, "stack_trace") if key in node.meta}
    copy.meta |= {"val": node.meta["val"].clone(), OWN_MEMORY: True}
    return copy

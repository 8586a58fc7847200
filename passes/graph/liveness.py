"""Count the bytes that a micro-batch holds at its peak, without variables and inputs."""

from collections.abc import Mapping, Sequence

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, Joint
from ipu_dynamo.ops.graph_queries import nbytes, owner

Again = Mapping[fx.Node, Sequence[fx.Node]]  # backward operator: nodes to repeat right before it
_Value = tuple[fx.Node, bool]  # the owner of memory, and whether it is the owner's repetition


def peak_bytes(capture: Joint, again: Again = {}) -> int:  # noqa: B006
    """The peak over a micro-batch, operator by operator in the graph's order.

    A gradient of a parameter is freed once it is computed: it is added to its accumulator.

    Args:
        again: forward operators that are repeated for the backward pass.
    """
    repeated = {node for nodes in again.values() for node in nodes}
    owners = {node: owner(node) for node in capture.graph.graph.nodes}

    def value(node: fx.Node, later: bool) -> _Value:
        base = owners[node]
        return base, later and base in repeated

    steps: list[tuple[fx.Node, bool, list[_Value]]] = []
    for node in capture.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        runs = [(copy, True) for copy in again.get(node, ())] + [(node, False)]
        for run, repetition in runs:
            later = repetition or bool(node.meta.get(BACKWARD))
            steps.append((run, repetition, [value(n, later) for n in run.all_input_nodes]))
    last: dict[_Value, int] = {}
    for index, (_, _, reads) in enumerate(steps):
        for source in reads:
            last[source] = index
    for node, role in zip(capture.returned, capture.outputs, strict=True):
        if node is not None and role.kind != "gradient":
            last[value(node, False)] = len(steps)
    held: dict[_Value, int] = {}
    peak = live = 0
    for index, (node, repetition, reads) in enumerate(steps):
        result = (node, repetition)
        if owners[node] is node:
            held[result] = nbytes(node)
            live += held[result]
        peak = max(peak, live)
        for source in {result, *reads}:
            if source in held and last.get(source, index) <= index:
                live -= held.pop(source)
    return peak

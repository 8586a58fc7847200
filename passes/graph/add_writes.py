"""Put writes of variables into a graph, as operators that work in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import root
from ipu_dynamo.program import OWN_MEMORY, Accumulation


@dataclass(frozen=True, slots=True)
class GraphWrite:
    """A write within a graph.

    Args:
        target, weight: placeholders of the graph.
        value: any node of it.
    """

    target: fx.Node
    value: fx.Node
    rule: Accumulation | Literal["buffer"]
    weight: fx.Node | None = None


def add_writes(graph: fx.Graph, writes: Sequence[GraphWrite]) -> None:
    """Insert writes: of sums as soon as their values exist, of buffers at the end.

    So a sum's value need not be kept, and all buffers are read before. Sums keep the order of
    `writes`. Results stay results.
    """
    last: dict[fx.Node, fx.Node] = {}  # the last write to an accumulator
    placed = {node: place for place, node in enumerate(graph.nodes)}
    order = [write for write in writes if write.rule != "buffer"]
    for write in order:
        before = last.get(write.target)
        behind = write.value
        if before is not None and placed[before] >= placed[behind]:
            behind = before
        node = _accumulate(graph, write, behind)
        placed[node] = placed[behind]
        last[write.target] = node
    (output,) = graph.find_nodes(op="output")
    for write in writes:
        if write.rule == "buffer":
            with graph.inserting_before(output):
                _call(graph, aten.copy_.default, write.target, write.value, like=write.value)


def _accumulate(graph: fx.Graph, write: GraphWrite, behind: fx.Node) -> fx.Node:
    """Write a sum after a node; after a placeholder means after all of them."""
    while behind.op == "placeholder" and behind.next.op == "placeholder":
        behind = behind.next
    target, value, weight = write.target, write.value, write.weight
    with graph.inserting_before(behind.next):
        if write.rule == "store":
            return _call(graph, aten.copy_.default, target, value, like=value)
        if weight is None:
            return _call(graph, aten.add_.Tensor, target, value, like=value)
        if target.meta["val"].dtype != value.meta["val"].dtype:
            value = _call(graph, aten.type_as.default, value, target, like=value)
            value.meta["val"] = value.meta["val"].to(target.meta["val"].dtype)
        if target.meta["val"].dtype != weight.meta["val"].dtype:
            weight = _call(graph, aten.type_as.default, weight, target, like=value)
            weight.meta["val"] = target.meta["val"].new_empty(())
        return _call(graph, aten.lerp_.Tensor, target, value, weight, like=value)


def _call(graph: fx.Graph, target: Any, *args: fx.Node, like: fx.Node) -> fx.Node:
    """Append a call whose value and source line are those of `like`."""
    node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in ("val", "stack_trace") if key in like.meta}
    return node


def drop_own_memory(graph: fx.Graph) -> None:
    """Erase copies that only a write reads, unless another write changes their originals before."""
    written: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.target not in _WRITES:
            continue
        target, copy = node.all_input_nodes[:2]
        original = copy.args[0] if copy.meta.get(OWN_MEMORY) else None
        alone = len(copy.users) == 1
        if isinstance(original, fx.Node) and alone and root(original) not in written:
            copy.replace_all_uses_with(original)
            node.meta["val"] = original.meta["val"]
            graph.erase_node(copy)
        written.add(target)


_WRITES = (aten.copy_.default, aten.add_.Tensor, aten.lerp_.Tensor)

"""Put the nodes of a graph under conversion into groups by canonical name, in the order of data.

Everything a user names, places, counts or pays for is a group. Each node of such a graph carries
its name in `meta["custom"]`, placeholders too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.private.node_meta import CUSTOM
from ipu_dynamo.saved_model.exported.node_names import (
    NAME,
    Kind,
    is_result_of_tuple,
    operator_name,
)

KIND = "ipu_kind"  # key of a placeholder's meta: a Kind
CAST = "ipu_cast"  # key of meta["custom"]: a conversion has put the node in


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes of one canonical name.

    Attributes:
        nodes: in the order of the graph.
        kind: expressions of users match those of kind OP that are no casts.
        operator: the overload of its last call, such as `aten.linear.default`; "" of a placeholder.
        value: the node that gives its value; of several results the first.
        reads: names of the groups whose values it takes, without repetition.
        is_cast: a conversion has put it in; it is where its consumer is.
        is_size: its result is a size or nothing, and follows from the shapes of the inputs. It is
            on no device, and no value crosses a border for it.
    """

    name: str
    kind: Kind
    nodes: tuple[fx.Node, ...]
    operator: str
    value: fx.Node
    reads: tuple[str, ...]
    is_cast: bool = False
    is_size: bool = False

    @property
    def is_matched(self) -> bool:
        """Whether expressions of users may match it."""
        return self.kind is Kind.OP and not self.is_cast


def node_groups(graph: fx.Graph) -> tuple[NodeGroup, ...]:
    """All groups, each after those that it reads, and else in the order of the graph.

    Raises:
        ValueError: two groups read each other.
    """
    members: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "output":
            members.setdefault(name_of(node), []).append(node)
    groups = {name: _group(name, nodes) for name, nodes in members.items()}
    ordered: dict[str, NodeGroup] = {}
    for name in groups:
        _visit(name, groups, ordered)
    return tuple(ordered.values())


def name_of(node: fx.Node) -> str:
    """The canonical name that a node carries."""
    return str(node.meta[CUSTOM][NAME])


def set_name(node: fx.Node, name: str, *, cast: bool = False) -> None:
    """Let a node carry a canonical name."""
    custom: dict[str, Any] = {**node.meta.get(CUSTOM, {}), NAME: name}
    if cast:
        custom[CAST] = True
    node.meta[CUSTOM] = custom


def owners(groups: tuple[NodeGroup, ...]) -> Mapping[fx.Node, NodeGroup]:
    """The group of each node."""
    return {node: group for group in groups for node in group.nodes}


def _group(name: str, nodes: list[fx.Node]) -> NodeGroup:
    if nodes[0].op == "placeholder":
        assert len(nodes) == 1, f"the name {name!r} of an input or parameter is not its own"
        return NodeGroup(name, nodes[0].meta[KIND], (nodes[0],), "", nodes[0], ())
    reads = dict.fromkeys(name_of(source) for node in nodes for source in node.all_input_nodes)
    calls = [node for node in nodes if not is_result_of_tuple(node)]
    last = calls[-1]
    results = [node for node in nodes if is_result_of_tuple(node) and node.args[0] is last]
    return NodeGroup(
        name,
        Kind.OP,
        tuple(nodes),
        operator_name(last),
        (results or [last])[0],
        tuple(read for read in reads if read != name),
        is_cast=bool(last.meta[CUSTOM].get(CAST)),
        is_size=all(_is_size(node) for node in nodes),
    )


def gives_tensor(group: NodeGroup) -> bool:
    """Whether a node of a group gives a tensor, or several."""
    return any(_has_tensor(node.meta.get("val")) for node in group.nodes)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


def depends_on_data(value: Any) -> bool:
    """Whether a value is, or has in its shape, a size that is known only after computing."""
    if isinstance(value, tuple | list):
        return any(depends_on_data(part) for part in value)
    if isinstance(value, Tensor):
        return any(depends_on_data(size) for size in value.shape)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        # PyTorch names sizes of inputs s0, s1, ..., and those of data u0, zuf1, ...
        symbols = value.node.expr.free_symbols
        return any(not str(symbol).startswith("s") for symbol in symbols)
    return False


def _is_size(node: fx.Node) -> bool:
    read = [source.meta.get("val") for source in node.all_input_nodes]
    return not any(map(depends_on_data, read)) and _is_number(node.meta.get("val"))


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return not isinstance(value, Tensor) and not depends_on_data(value)


def _visit(start: str, groups: Mapping[str, NodeGroup], ordered: dict[str, NodeGroup]) -> None:
    """Append a group after all that it reads; graphs are deeper than Python's stack."""
    path, todo = {start: None}, [(start, iter(groups[start].reads))]
    if start in ordered:
        return
    while todo:
        name, reads = todo[-1]
        for read in reads:
            if read in path:
                raise ValueError(f"nodes {read!r} and {name!r} read each other")
            if read not in ordered:
                path[read] = None
                todo.append((read, iter(groups[read].reads)))
                break
        else:
            ordered[name] = groups[name]
            del path[name]
            todo.pop()

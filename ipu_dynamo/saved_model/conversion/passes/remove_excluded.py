"""Delete the host's operators before those of IPUs; their results become inputs.

Before   input %x; %h = aten.embedding(%w, %x)  on the host; %y = aten.relu(%h)  on an IPU
After    input "embedding" %h; %y = aten.relu(%h)
Keeps    values of results, if the new inputs have the values that the host would have computed.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": remove_excluded_nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.saved_model.conversion.drafts.draft import HOST, Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import KIND, name_of, owners, set_name
from ipu_dynamo.saved_model.conversion.partitions.partition_order import check_head
from ipu_dynamo.saved_model.conversion.passes.edit import drop_unread, insert_call
from ipu_dynamo.saved_model.exported.node_names import Kind, is_result_of_tuple


def plan(draft: Draft) -> Mapping[str, fx.Node]:
    """The host's values that IPUs or results need, by their names as inputs.

    Raises:
        ValueError: the host reads a result of an IPU.
    """
    check_head(draft, "remove_excluded_nodes")
    groups = draft.groups()
    owner = owners(groups)
    host = {group.name for group in groups if draft.placement.devices.get(group.name) == HOST}
    edges: dict[str, fx.Node] = {}
    for node in draft.graph.nodes:
        if node.op != "call_function" or name_of(node) not in host:
            continue
        if any(not _is_inner(user, owner, host) for user in node.users):
            edges[_input_name(node, {*draft.inputs, *edges})] = node
    return edges


def _input_name(node: fx.Node, taken: set[str]) -> str:
    """The name of an input in the place of a node: its own, with the number of a later result."""
    result = int(str(node.args[1])) if is_result_of_tuple(node) else 0
    name = f"{name_of(node)}_{result}" if result else name_of(node)
    while name in taken:
        result += 1
        name = f"{name_of(node)}_{result}"
    return name


def _is_inner(user: fx.Node, owner: Mapping[fx.Node, Any], host: set[str]) -> bool:
    """Whether a reader belongs to the host's part, or needs only a shape."""
    return user.op != "output" and (name_of(user) in host or owner[user].is_size)


def apply(draft: Draft, edges: Mapping[str, fx.Node]) -> None:
    """Replace the host's values by inputs, and remove nodes that nothing reads then."""
    graph, devices = draft.graph, draft.placement.devices
    sizes = [node for group in draft.groups() if group.is_size for node in group.nodes]
    for name, node in edges.items():
        _make_input(draft, name, node)
    _take_sizes_from_inputs(draft, sizes)
    host = {name for name, device in devices.items() if device == HOST}
    for node in list(graph.nodes):  # whose sizes no input has
        if node.op == "call_function" and name_of(node) in host and _outside(node, host):
            _make_input(draft, _input_name(node, set(draft.inputs)), node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and name_of(node) in host:
            graph.erase_node(node)
    drop_unread(graph, draft.tensors)
    for name in [name for name, node in draft.inputs.items() if not node.users]:
        graph.erase_node(draft.inputs.pop(name))
    draft.placement = replace(
        draft.placement, devices={n: device for n, device in devices.items() if n not in host}
    )


def _make_input(draft: Draft, name: str, node: fx.Node) -> None:
    """Replace the value of a node by an input."""
    with draft.graph.inserting_before(next(iter(draft.graph.nodes))):
        placeholder = draft.graph.placeholder(f"{node.name}_input")
    placeholder.meta = {"val": node.meta["val"], KIND: Kind.INPUT}
    set_name(placeholder, name)
    node.replace_all_uses_with(placeholder)
    for output, value in draft.outputs.items():
        if value is node:
            draft.outputs[output] = placeholder
    draft.inputs[name] = placeholder


def _outside(node: fx.Node, host: set[str]) -> bool:
    return any(user.op == "output" or name_of(user) not in host for user in node.users)


def _take_sizes_from_inputs(draft: Draft, sizes: Sequence[fx.Node]) -> None:
    """Read sizes from the new inputs, where they have them: others may go then."""
    for node in sizes:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            continue
        for placeholder in reversed(draft.inputs.values()):
            shape = placeholder.meta["val"].shape
            dims = [d for d, size in enumerate(shape) if _same(size, value)]
            if not dims:
                continue
            with draft.graph.inserting_before(node):
                size = insert_call(
                    draft.graph,
                    aten.sym_size.int,
                    placeholder,
                    dims[0],
                    name=name_of(node),
                    value=value,
                )
            node.replace_all_uses_with(size)
            break
    draft.graph.eliminate_dead_code()


def _same(size: Any, value: torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr == value.node.expr)


@dataclass(frozen=True, slots=True)
class RemoveExcluded:
    """The pass."""

    name: ClassVar[str] = "RemoveExcluded"
    remove_excluded_nodes: bool = False

    def __call__(self, draft: Draft) -> bool:
        """Rewrite `draft` in place; return whether anything changed."""
        if not self.remove_excluded_nodes or HOST not in draft.placement.devices.values():
            return False
        apply(draft, plan(draft))
        return True

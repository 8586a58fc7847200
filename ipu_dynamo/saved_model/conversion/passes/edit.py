"""Insert calls into a draft's graph, and work their values out."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, set_name


def insert_call(
    graph: fx.Graph,
    target: Any,
    *args: Any,
    name: str,
    value: Any,
    cast: bool = False,
    **kwargs: Any,
) -> fx.Node:
    """A call at the insertion point of the graph.

    Args:
        name: its canonical name.
        value: its result, for `meta["val"]`.
    """
    node = graph.call_function(target, args, kwargs)
    set_name(node, name, cast=cast)
    node.meta["val"] = value
    return node


def with_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A fake tensor like another one, of another type.

    `value.to(dtype)` would compare sizes that calls choose, and fix them.
    """
    with fake_mode_of([value]):
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


def matches(name: str, expressions: Iterable[str]) -> bool:
    """Whether an expression is found in a name."""
    return any(re.search(expression, name) for expression in expressions)


def external_inputs(group: NodeGroup) -> list[fx.Node]:
    """The nodes of tensors outside of a group that it reads, each once, in their order."""
    members = set(group.nodes)
    sources = [source for node in group.nodes for source in node.all_input_nodes]
    return [
        source
        for source in dict.fromkeys(sources)
        if source not in members and isinstance(source.meta["val"], Tensor)
    ]


def read_instead(group: NodeGroup, replacements: Mapping[fx.Node, fx.Node]) -> None:
    """Let the nodes of a group read others; values stay as they were."""
    for node in group.nodes:
        for old, new in replacements.items():
            node.replace_input_with(old, new)


def drop_unread(graph: fx.Graph, tensors: dict[fx.Node, Tensor]) -> None:
    """Take out calls that nothing reads, and placeholders of tensors that nothing reads then."""
    graph.eliminate_dead_code()
    for node in [node for node in tensors if not node.users]:
        del tensors[node]
        graph.erase_node(node)

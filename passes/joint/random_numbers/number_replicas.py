"""Let the index of a replica come to it from the host.

Before   %i: i64[] = ipu.replica_index()
After    an input %replica_index, which is 0, 1, ... on each replica
Keeps    everything else.
Source   design of this project: a program is the same for every replica, and what tells them apart
         is an input.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ipu_dynamo.capture.capture import REPLICA_INDEX, Capture, Placeholder
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.passes.levels import Level


@dataclass(frozen=True)
class NumberReplicas:
    """The pass."""

    name: ClassVar[str] = "NumberReplicas"
    level: ClassVar[Level] = "joint"
    needed: ClassVar[str] = "every replica would be number 0"

    def __call__(self, capture: Capture) -> bool:
        graph = capture.graph.graph
        for node in graph.nodes:
            if any(_within(node)):
                raise CompileError(
                    "the body of a loop or branch asks for the index of its replica",
                    node=node,
                    hint="call ipu_dynamo.replica_index() before it, and give that as replica=",
                    id="operator",
                )
        target = torch.ops.ipu.replica_index.default
        nodes = list(graph.find_nodes(op="call_function", target=target))
        if not nodes:
            return False
        placeholders = capture.placeholder_nodes
        with graph.inserting_after(placeholders[-1] if placeholders else None):
            index = graph.placeholder(REPLICA_INDEX)
        index.meta["val"] = nodes[0].meta["val"]
        capture.placeholders = (*capture.placeholders, Placeholder(REPLICA_INDEX, "replica"))
        for node in nodes:
            node.replace_all_uses_with(index)
            graph.erase_node(node)
        capture.graph.recompile()
        return True


def _within(node: fx.Node) -> Iterator[bool]:
    """For each operator of the bodies that a node runs, whether it asks for the index."""
    for body in bodies_of(node):
        for inner in body.graph.graph.nodes:
            yield inner.target is torch.ops.ipu.replica_index.default
            yield from _within(inner)

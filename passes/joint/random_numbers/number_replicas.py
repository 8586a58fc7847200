"""Let the index of a replica, and the weight of a micro-batch, come from the host.

Before   %i: i64[] = ipu.replica_index()
         %w: f32[] = ipu.accumulation_weight()
         %y = aten.mul(%i, %w)
After    %r: i64[] = replica(".replica_index")                         # 0, 1, ... on each replica
         %a: f32[] = accumulation(".accumulation_weight")              # 1, 1/2, 1/3, ... in a step
         %y = aten.mul(%r, %a)
Keeps    everything else.
Source   design of this project: a program is the same for every replica and micro-batch. The values
         in which they differ are inputs.
"""

from collections.abc import Iterator

import torch
from torch import fx

from ipu_dynamo.capture.capture import (
    ACCUMULATION_WEIGHT,
    REPLICA_INDEX,
    Joint,
    Placeholder,
    PlaceholderKind,
)
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.marks.step_end import accumulation_weight_op
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.graph.builder import new_input
from ipu_dynamo.passes.kit import GraphPass

_INPUTS: tuple[tuple[OpOverload, str, PlaceholderKind], ...] = (
    (torch.ops.ipu.replica_index.default, REPLICA_INDEX, "replica"),
    (accumulation_weight_op, ACCUMULATION_WEIGHT, "accumulation"),
)


class NumberReplicas(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = tuple(operator for operator, _, _ in _INPUTS)
    needed = "every replica would be number 0"

    def rewrite(self, capture: Joint) -> bool:
        for node in capture.graph.graph.nodes:
            if any(_within(node)):
                raise CompileError(
                    "the body of a loop or branch asks for the index of its replica",
                    node=node,
                    hint="call ipu_dynamo.replica_index() before it, and give that as replica=",
                    id="operator",
                )
        inputs = [_as_input(capture, *rule) for rule in _INPUTS]
        return any(inputs)


def _as_input(capture: Joint, operator: OpOverload, name: str, kind: PlaceholderKind) -> bool:
    """Replace an operator by an input, if the graph has it."""
    graph = capture.graph.graph
    nodes = list(graph.find_nodes(op="call_function", target=operator))
    if not nodes:
        return False
    value = new_input(graph, name, next(reversed(capture.placeholder_nodes), None))
    value.meta["val"] = nodes[0].meta["val"]
    capture.placeholders = (*capture.placeholders, Placeholder(name, kind))
    for node in nodes:
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return True


def _within(node: fx.Node) -> Iterator[bool]:
    """For each operator of the bodies that a node runs, whether it asks for the index."""
    for body in bodies_of(node):
        for inner in body.graph.graph.nodes:
            yield inner.target is torch.ops.ipu.replica_index.default
            yield from _within(inner)

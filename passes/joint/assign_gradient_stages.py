"""Give every node of the joint graph a stage, and make the stages' order follow the data.

Before   %h = aten.relu(%x: f32[n])    in stage 0, forward
         %y = aten.exp(%h)             in stage 1, forward
         %g = aten.mul(%y, %y)         in stage 1, backward
         %d = aten.add(%g, %h)         in backward    # a sum of gradients, made by autograd
         %e = aten.mul(%d, %h)         in stage 0, backward
         capture.ipus = {0: 0, 1: 1}
After    the same
         %d                            in stage 1     # where its last term is made
Keeps    the graph; only meta["ipu.stage"] and meta["ipu.backward"] change.
Source   PopTorch user guide, "Annotation tools": a gradient runs where its forward operator runs.
"""

import operator

from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.passes.kit import Pass


def slot(stage: int, backward: bool, stages: int, *, joined: bool = True) -> int:
    """When a node runs within a micro-batch, from 0.

    The last stage's two passes are one slot if `joined`: unless they are in different phases.
    """
    return 2 * stages - 1 - joined - stage if backward else stage


def stage_of_slot(index: int, stages: int, *, joined: bool = True) -> int:
    """The stage that runs in a slot."""
    return index if index < stages else 2 * stages - 1 - joined - index


def plan(capture: Joint) -> dict[fx.Node, int]:
    """The slot of every operator: its stage's own, or later where it reads a later result."""
    stages = max(capture.ipus) + 1
    slots: dict[fx.Node, int] = {}
    unknown: list[fx.Node] = []
    for node in capture.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in slots:
            slots[node] = slots[node.args[0]]  # one result of an operator: where that runs
            continue
        of_sources = [slots[source] for source in node.all_input_nodes if source in slots]
        stage = node.meta.get(STAGE)
        if stage is not None:
            of_sources.append(slot(stage, node.meta[BACKWARD], stages, joined=capture.joined))
        if of_sources:
            slots[node] = max(of_sources)
        else:
            unknown.append(node)
    for node in reversed(unknown):
        slots[node] = min((slots[user] for user in node.users if user in slots), default=0)
    return slots


class AssignGradientStages(Pass):
    """The pass."""

    level = "joint"
    needed = "every operator has to have a stage"

    def __call__(self, capture: Joint) -> bool:
        stages = max(capture.ipus) + 1
        changed = False
        for node, index in plan(capture).items():
            stage = stage_of_slot(index, stages, joined=capture.joined)
            # In a joined slot both directions are possible; other slots have one direction.
            both = capture.joined and index == stages - 1
            backward = node.meta[BACKWARD] if both else index >= stages
            if (node.meta.get(STAGE), node.meta[BACKWARD]) != (stage, backward):
                node.meta[STAGE], node.meta[BACKWARD] = stage, backward
                changed = True
        return changed

"""Cut the placed graph into one flat graph per stage and direction.

Before   one graph whose nodes carry meta["ipu.stage"] and meta["ipu.backward"]
After    Parts in the order in which a micro-batch runs them; what one makes and a later one reads
         is an output of the first and an input of the second; gradients and new values of buffers
         are outputs, too, and what is written of them to which variable stands beside the graph
Keeps    every operator; views and constants are repeated where they are read, not sent.
Source   PopTorch user guide, "poptorch.PipelinedExecution": forward and backward of the last
         stage are one.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from ipu_dynamo.capture.capture import (
    BACKWARD,
    STAGE,
    Capture,
    Placeholder,
)
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, numel, root
from ipu_dynamo.ops.private.graphs import OpOverload, module_of
from ipu_dynamo.passes.graph.builder import new_input
from ipu_dynamo.passes.joint.assign_gradient_stages import slot, stage_of_slot
from ipu_dynamo.passes.levels import Level, Part, Partitioned, PartWrite
from ipu_dynamo.program import RECOMPUTED, Accumulation, Direction

aten = torch.ops.aten


def accumulator(parameter: str) -> str:
    """The name of the variable that sums the gradients of `parameter`."""
    return f"{parameter}.grad"


def counter(stage: int) -> str:
    """The name of the variable that counts elements of gradients of a stage that are not large."""
    return f"loss_scale.within{stage}"


@dataclass
class Draft:
    """A part under construction: a graph, and copies of the capture's nodes in it."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    outputs: dict[str, fx.Node] = field(default_factory=dict)
    written: dict[str, fx.Node] = field(default_factory=dict)  # results that may be for writes only
    writes: list[PartWrite] = field(default_factory=list)

    def take(self, name: str, value: torch.Tensor) -> fx.Node:
        """The placeholder for the input `name`, made on first use, before all operators."""
        if name not in self.inputs:
            last = next(reversed(self.inputs.values()), None)
            node = new_input(self.graph, name, last)
            node.meta["val"] = value
            self.inputs[name] = node
        return self.inputs[name]

    def call(self, target: OpOverload, *args: fx.Node | float, like: fx.Node) -> fx.Node:
        """Append a call whose value and source line are those of `like`."""
        node = self.graph.call_function(target, args)
        node.meta = {k: like.meta[k] for k in ("val", "stack_trace") if k in like.meta}
        if target is aten.clone.default:
            node.meta["val"] = like.meta["val"].clone()  # dense, also where `like` is expanded
        return node


class _Cutter:
    """Build the drafts, one per slot. Invariant: a value is an output of the draft that makes it
    as soon as a later draft reads it."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.stages = max(capture.ipus) + 1
        self.roles: dict[fx.Node, Placeholder] = capture.roles()
        recomputes = any(
            node.meta.get(RECOMPUTED) and node.meta[STAGE] == self.stages - 1
            for node in capture.graph.graph.nodes
        )
        # What saves memory by repeating must stay apart from what it repeats.
        self.joined = capture.joined and not recomputes
        self.slots: dict[fx.Node, int] = {
            node: slot(node.meta[STAGE], node.meta[BACKWARD], self.stages, joined=self.joined)
            for node in capture.graph.graph.nodes
            if node.op not in ("placeholder", "output")
        }
        self.drafts: dict[int, Draft] = {index: Draft() for index in sorted({*self.slots.values()})}
        self.changes: dict[fx.Node, fx.Node] = {}  # placeholder -> its new value
        by_name = {role.name: node for node, role in self.roles.items()}
        for node, role in zip(capture.returned, capture.outputs, strict=True):
            if role.kind == "mutation" and node is not None:
                self.changes[by_name[role.name]] = node

    def fill(self) -> None:
        """Copy every operator into the draft of its slot."""
        for node, index in self.slots.items():
            if node not in self.drafts[index].copies:
                self.copy(node, index)

    def copy(self, node: fx.Node, index: int) -> fx.Node:
        """Copy `node` to draft `index`, with what it reads."""
        draft = self.drafts[index]
        for source in node.all_input_nodes:
            self.value(source, index)
        draft.copies[node] = draft.graph.node_copy(node, lambda n: draft.copies[n])
        return draft.copies[node]

    def value(self, node: fx.Node, index: int) -> fx.Node:
        """The node that stands for `node` in draft `index`: a copy, or an input."""
        draft = self.drafts[index]
        if node in draft.copies:
            return draft.copies[node]
        if node.op == "placeholder":
            draft.copies[node] = self.read_placeholder(node, index)
            return draft.copies[node]
        made = self.slots[node]
        if made == index:
            return self.copy(node, index)
        if repeated(node):
            return self.copy(node, index)
        self.drafts[made].outputs.setdefault(node.name, self.value(node, made))
        draft.copies[node] = draft.take(node.name, node.meta["val"])
        return draft.copies[node]

    def read_placeholder(self, node: fx.Node, index: int) -> fx.Node:
        """The input for a placeholder: its value from before any change, also after the change."""
        role, draft = self.roles[node], self.drafts[index]
        new = self.changes.get(node)
        if new is None or role.kind == "input" or new not in self.slots:
            return draft.take(role.name, node.meta["val"])
        changer = self.slots[new]
        if index <= changer:
            return draft.take(role.name, node.meta["val"])
        before = f"{role.name}.before"
        saving = self.drafts[changer]
        if before not in saving.outputs:
            old = self.value(node, changer)
            saving.outputs[before] = saving.call(aten.clone.default, old, like=node)
        return draft.take(before, node.meta["val"])

    def change(self, placeholder: fx.Node) -> None:
        """Write a variable's new value, which is a result of the part that computes it."""
        new, name = self.changes[placeholder], self.roles[placeholder].name
        index = self.slots.get(new, min(self.drafts, default=0))
        value = new.name if new in self.slots else f"{name}.new"
        self.write(PartWrite(name, value, "buffer"), new, index)

    def write(self, write: PartWrite, node: fx.Node, index: int) -> None:
        """Make a value that is written a result of a draft."""
        draft = self.drafts[index]
        draft.written.setdefault(write.value, self.value(node, index))
        draft.writes.append(write)

    def deliver(self, node: fx.Node, taken: set[fx.Node]) -> str:
        """Make a value that is returned to the host an output; give it memory of its own, unless
        the caller wants aliases."""
        base = root(node)
        index = self.slots.get(node, min(self.slots.values(), default=0))
        if self.capture.aliases or (base.op != "placeholder" and base not in taken):
            taken.add(base)
            self.drafts[index].outputs.setdefault(node.name, self.value(node, index))
            return node.name
        draft = self.drafts[index]
        name = f"{node.name}.returned{len(taken)}"
        taken.add(node)
        draft.outputs[name] = draft.call(aten.clone.default, self.value(node, index), like=node)
        return name

    def accumulate(self, name: str, node: fx.Node, rule: Accumulation) -> None:
        """Write a gradient to its accumulator."""
        write = PartWrite(accumulator(name), node.name, rule, parameter=name)
        self.write(write, node, self.slots[node])

    def count(self, node: fx.Node) -> None:
        """Add the number of elements that are not large to the counter of a stage."""
        index = self.slots[node]
        stage = stage_of_slot(index, self.stages, joined=self.joined)
        self.write(PartWrite(counter(stage), node.name, "+="), node, index)


@dataclass(frozen=True)
class Partition:
    """The pass.

    Args:
        accumulation: how a micro-batch's gradient enters its accumulator: `store` overwrites it,
            for one micro-batch per step.
    """

    name: ClassVar[str] = "Partition"
    level: ClassVar[Level] = "joint"
    needed: ClassVar[str] = "a program is written from the graphs of its stages"

    accumulation: Accumulation

    def __call__(self, capture: Capture) -> Partitioned:
        _rename_values(capture)
        cutter = _Cutter(capture)
        cutter.drafts.setdefault(0, Draft())
        cutter.fill()
        returned, changed = [], {}
        taken: set[fx.Node] = set()
        by_name = {role.name: node for node, role in cutter.roles.items()}
        for node, role in zip(capture.returned, capture.outputs, strict=True):
            if node is None:
                continue
            if role.kind == "value":
                returned.append(cutter.deliver(node, taken))
            elif role.kind == "gradient":
                cutter.accumulate(role.name, node, self.accumulation)
            elif role.kind == "count":
                cutter.count(node)
            elif cutter.roles[by_name[role.name]].kind == "input":
                changed[role.name] = cutter.deliver(node, taken)
        for placeholder in cutter.changes:
            if cutter.roles[placeholder].kind != "input":
                cutter.change(placeholder)
        parts = [
            _part(capture, cutter, index, draft)
            for index, draft in sorted(cutter.drafts.items())
            if draft.copies or draft.outputs or draft.written
        ]
        return Partitioned(tuple(parts), tuple(returned), changed, capture)


def _rename_values(capture: Capture) -> None:
    """Rename nodes that are called like an input or a variable: parts find values by name."""
    taken = {role.name for role in capture.placeholders}
    for node in capture.graph.graph.nodes:
        if node.op != "placeholder" and node.name in taken:
            node._rename(f"{node.name}_value")


def _part(capture: Capture, cutter: _Cutter, index: int, draft: Draft) -> Part:
    last = cutter.stages - 1
    stage = stage_of_slot(index, cutter.stages, joined=cutter.joined)
    direction: Direction = "forward" if index <= last else "backward"
    if index == last and cutter.joined:
        direction = capture.alone or ("forward_backward" if capture.training else "forward")
    outputs = {
        **draft.outputs,
        **{n: v for n, v in draft.written.items() if n not in draft.outputs},
    }
    result = draft.graph.output(tuple(outputs.values()))
    result.meta["val"] = None
    graph = module_of(draft.graph)
    graph.graph.lint()
    return Part(
        stage=stage,
        direction=direction,
        ipu=capture.ipus[stage],
        graph=graph,
        inputs=tuple(draft.inputs),
        outputs=tuple(outputs),
        writes=tuple(draft.writes),
        phase=capture.phases[stage][direction == "backward"] if capture.phases else None,
    )


def repeated(node: fx.Node) -> bool:
    """Whether to compute `node` again where it is read: a constant, or a view no smaller than
    what it looks at."""
    if makes_constant(node):
        return True
    if not is_view(node):
        return False
    if not isinstance(node.meta["val"], torch.Tensor):
        return True  # a list of views, of which one is wanted
    base = root(node)
    return base.op == "placeholder" or numel(node.meta["val"]) >= numel(base.meta["val"])

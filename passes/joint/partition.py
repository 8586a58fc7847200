"""Cut the placed graph into one flat graph per stage and direction.

Before   capture.ipus = {0: 0, 1: 1}
         %w: f32[k,n] = parameter
         %h = aten.mm(%x: f32[m,k], %w)            in stage 0, forward
         %y = aten.relu(%h)                        in stage 1, forward
         %g = aten.mm(aten.t(%x), %y)              in stage 0, backward
         return (%y, gradient(%w, %g))
After    the same
         def forward0(%x: f32[m,k], %w: f32[k,n]):
             %h = aten.mm(%x, %w)                  in stage 0, forward
             return (%h,)
         def forward1(%h: f32[m,n]):
             %y = aten.relu(%h)                    in stage 1, forward
             return (%y,)
         def backward0(%x: f32[m,k], %y: f32[m,n]):
             %g = aten.mm(aten.t(%x), %y)          in stage 0, backward
             return (%g,)
         Partitioned(
             (
                 Part(0, "forward", 0, forward0, ("x", "w"), ("h",)),
                 Part(1, "forward", 1, forward1, ("h",), ("y",)),
                 Part(0, "backward", 0, backward0, ("x", "y"), ("g",),
                      (PartWrite("w..grad", "g", "store", "w"),)),
             ),
             ("y",), {}, capture,
         )
Keeps    every operator; views and constants are repeated where they are read, not sent, unless
         stages are kept as they were given.
Source   PopTorch user guide, "poptorch.PipelinedExecution": forward and backward of the last
         stage are one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import (
    BACKWARD,
    STAGE,
    Joint,
    Placeholder,
)
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, numel, root
from ipu_dynamo.ops.library.replica_collectives import (
    COLLECTIVES,
    Exchanged,
    all_gather_op,
    all_reduce_op,
    all_to_all_op,
)
from ipu_dynamo.ops.private.graphs import rename_node
from ipu_dynamo.passes.graph.extract import Cut, Extraction
from ipu_dynamo.passes.joint.assign_gradient_stages import slot, stage_of_slot
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Part, Partitioned, PartWrite
from ipu_dynamo.program import (
    RECOMPUTED,
    Accumulation,
    Collective,
    CollectiveKind,
    Direction,
    ReplicaGroups,
    TensorType,
)
from ipu_dynamo.program.ir import made_names
from ipu_dynamo.program.ir.made_names import accumulator, alone, is_made, made_of
from ipu_dynamo.program.machine_marks import MACHINE

_KINDS: dict[Any, CollectiveKind] = {
    all_gather_op: "all_gather",
    all_reduce_op: "all_reduce",
    all_to_all_op: "all_to_all",
}


def counter(stage: int) -> str:
    """The name of the variable that counts elements of gradients of a stage that are not large."""
    return alone(f"loss_scale.within{stage}")


class _Cutter(Extraction):
    """Cut at slots, and these at collectives.

    A place is a slot and a *turn*: the number of collectives that a micro-batch has passed in the
    slot. `written` has results of a place that may be for writes only.
    """

    def __init__(self, capture: Joint) -> None:
        self.capture = capture
        self.stages = max(capture.ipus) + 1
        self.roles: dict[fx.Node, Placeholder] = capture.roles()
        recomputes = any(
            node.meta.get(RECOMPUTED) and node.meta[STAGE] == self.stages - 1
            for node in capture.graph.graph.nodes
        )
        # A repetition that saves memory must be in another part than its original.
        self.joined = capture.joined and not recomputes
        slots = {
            node: slot(node.meta[STAGE], node.meta[BACKWARD], self.stages, joined=self.joined)
            for node in capture.graph.graph.nodes
            if node.op not in ("placeholder", "output")
        }
        turns = _turns(slots)
        self.most = 1 + max(turns.values(), default=0)  # turns of a slot
        places = {node: index * self.most + turns[node] for node, index in slots.items()}
        sending = {index - 1 for node, index in places.items() if node.target in COLLECTIVES}
        super().__init__(
            Cut(
                place=places,
                inputs={node: role.name for node, role in self.roles.items()},
                name=lambda node: node.name,
                repeats=self.repeats,
            ),
            sorted({0, *places.values(), *sending}),
        )
        self.collectives: dict[str, Collective] = {}  # by result
        self.written: dict[int, dict[str, fx.Node]] = {index: {} for index in self.pieces}
        self.writes: dict[int, list[PartWrite]] = {index: [] for index in self.pieces}
        self.changes: dict[fx.Node, fx.Node] = {}  # placeholder -> its new value
        by_name = {role.name: node for node, role in self.roles.items()}
        for node, role in zip(capture.returned, capture.outputs, strict=True):
            if role.kind == "mutation" and node is not None:
                self.changes[by_name[role.name]] = node

    def repeats(self, node: fx.Node, index: int) -> bool:
        """Whether a slot computes `node` of another one again; kept stages only their own."""
        if not repeated(node):
            return False
        return not self.capture.keeps_stages or self.stage(index) == node.meta[STAGE]

    def stage(self, index: int) -> int:
        """The stage that runs in a place."""
        return stage_of_slot(index // self.most, self.stages, joined=self.joined)

    def make(self, node: fx.Node, index: int) -> fx.Node:
        """Make a value in a place; the result of an exchange before the place becomes an input."""
        if node.target not in COLLECTIVES or self.cut.place[node] != index:
            return super().make(node, index)
        x, replicas, members, orthogonal = Exchanged.of(node)
        received = made_of(node.name, "received")
        self.collectives[received] = Collective(
            kind=_KINDS[node.target],
            value=self.sent(x, node, index - 1),
            result=received,
            type=TensorType.of(x.meta["val"]),
            members=members,
            ipu=self.capture.ipus[self.stage(index)],
            source=source_line(node),
            groups=None if members == replicas else ReplicaGroups(members, orthogonal),
        )
        return self.pieces[index].take(received, {"val": node.meta["val"]})

    def sent(self, x: fx.Node, collective: fx.Node, index: int) -> str:
        """Make each replica's operand of a collective an output of the place before it."""
        if self.cut.place.get(x) == index and not is_view(x) and x.target not in COLLECTIVES:
            return super().output(x)
        name = made_of(collective.name, "sent")
        self.pieces[index].outputs[name] = self.clone(x, index)
        return name

    def output(self, node: fx.Node) -> str:
        """Make a value an output of its slot.

        A view is copied if stages are kept: its source may be an argument, or an output, too.
        """
        index = self.cut.place[node]
        copied = self.capture.keeps_stages and is_view(node)
        copied |= root(node).target in COLLECTIVES
        if copied and node.name not in self.pieces[index].outputs:
            self.pieces[index].outputs[node.name] = self.clone(node, index)
        return super().output(node)

    def read(self, node: fx.Node, index: int) -> fx.Node:
        """An input of a slot; for a variable, its value from before any change, also after it."""
        if node not in self.roles:
            return super().read(node, index)
        role = self.roles[node]
        value = {key: node.meta[key] for key in ("val", MACHINE) if key in node.meta}
        changer = self.cut.place.get(self.changes.get(node, node), index)
        if role.kind == "input" or index <= changer:
            return self.pieces[index].take(role.name, value)
        before, saving = made_of(role.name, "before"), self.pieces[changer].outputs
        if before not in saving:
            saving[before] = self.clone(node, changer)
        return self.pieces[index].take(before, value)

    def clone(self, node: fx.Node, index: int) -> fx.Node:
        """Append a copy in its own memory; it is dense even if `node` is expanded."""
        new = self.pieces[index].graph.call_function(aten.clone.default, (self.value(node, index),))
        new.meta = {"val": node.meta["val"].clone()}
        if "stack_trace" in node.meta:
            new.meta["stack_trace"] = node.meta["stack_trace"]
        return new

    def change(self, placeholder: fx.Node) -> None:
        """Write a variable's new value, which is a result of the part that computes it."""
        new, name = self.changes[placeholder], self.roles[placeholder].name
        computed = new in self.cut.place
        value = new.name if computed else made_of(name, "new")
        self.write(PartWrite(name, value, "buffer"), new, self.cut.place[new] if computed else 0)

    def write(self, write: PartWrite, node: fx.Node, index: int) -> None:
        """Make a value that is written a result of a slot."""
        self.written[index].setdefault(write.value, self.value(node, index))
        self.writes[index].append(write)

    def deliver(self, node: fx.Node, taken: set[fx.Node]) -> str:
        """Make a value that is returned to the host an output.

        It gets its own memory, unless the caller wants aliases.
        """
        base = root(node)
        index = self.cut.place.get(node, min(self.cut.place.values(), default=0))
        outputs = self.pieces[index].outputs
        lent = base.op == "placeholder" or base.target in COLLECTIVES
        if self.capture.aliases or (not lent and base not in taken):
            taken.add(base)
            outputs.setdefault(node.name, self.value(node, index))
            return node.name
        name = made_names.returned(node.name, len(taken))
        taken.add(node)
        outputs[name] = self.clone(node, index)
        return name

    def accumulate(self, name: str, node: fx.Node, rule: Accumulation) -> None:
        """Write a gradient to its accumulator."""
        write = PartWrite(accumulator(name), node.name, rule, parameter=name)
        self.write(write, node, self.cut.place[node])

    def count(self, node: fx.Node) -> None:
        """Add the number of elements that are not large to the counter of a stage."""
        index = self.cut.place[node]
        self.write(PartWrite(counter(self.stage(index)), node.name, "+="), node, index)


class Partition(Pass):
    """The pass.

    Args:
        accumulation: how a micro-batch's gradient enters its accumulator: `store` overwrites it,
            for one micro-batch per step.
    """

    level = "joint"
    needed = "a program is written from the graphs of its stages"

    accumulation: Accumulation

    def __call__(self, capture: Joint) -> Partitioned:
        _refuse_made_names(capture)
        _rename_values(capture)
        cutter = _Cutter(capture)
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
            _part(capture, cutter, index)
            for index, piece in cutter.pieces.items()
            if piece.copies or piece.outputs or cutter.written[index]
        ]
        return Partitioned(
            tuple(parts),
            tuple(returned),
            changed,
            capture,
            collectives=cutter.collectives,
        )


def _turns(slots: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Count the collectives on the path to each operator within its slot, itself included."""
    turns: dict[fx.Node, int] = {}
    for node, index in slots.items():
        within = (turns[source] for source in node.all_input_nodes if slots.get(source) == index)
        turns[node] = max(within, default=0) + (node.target in COLLECTIVES)
    return turns


def _refuse_made_names(capture: Joint) -> None:
    """Refuse tensors of the model that are named like the values that a program makes."""
    for role in capture.placeholders:
        if role.name in capture.report.tensors and is_made(role.name):
            raise CompileError(
                f"the name of {role.kind} {role.name!r} has an empty part, as only names have "
                "that a program makes",
                hint="give each module a name, without a dot at its begin or end",
            )


def _rename_values(capture: Joint) -> None:
    """Rename nodes that are called like an input or a variable: parts find values by name."""
    taken = {role.name for role in capture.placeholders}
    for node in capture.graph.graph.nodes:
        while node.op != "placeholder" and node.name in taken:
            rename_node(node, f"{node.name}_value")


def _part(capture: Joint, cutter: _Cutter, index: int) -> Part:
    piece, last = cutter.pieces[index], cutter.stages - 1
    stage, (slot_, turn) = cutter.stage(index), divmod(index, cutter.most)
    direction: Direction = "forward" if slot_ <= last else "backward"
    if slot_ == last and cutter.joined:
        direction = capture.alone or ("forward_backward" if capture.training else "forward")
    for name, value in cutter.written[index].items():
        piece.outputs.setdefault(name, value)
    return Part(
        stage=stage,
        direction=direction,
        ipu=capture.ipus[stage],
        graph=piece.finish(),
        inputs=tuple(piece.inputs),
        outputs=tuple(piece.outputs),
        writes=tuple(cutter.writes[index]),
        phase=capture.phases[stage][direction == "backward"] if capture.phases else None,
        turn=turn,
    )


def repeated(node: fx.Node) -> bool:
    """Whether each reader computes `node` again: a constant, or a view as large as its source."""
    if makes_constant(node):
        return True
    if not is_view(node):
        return False
    if not isinstance(node.meta["val"], torch.Tensor):
        return True  # a list of views, of which one is wanted
    base = root(node)
    return base.op == "placeholder" or numel(node.meta["val"]) >= numel(base.meta["val"])

"""Cut a split graph in three: what runs before the micro-batches, for each of them, and after.

Before   one flat graph for the whole batch, and a Split
After    three captures; what one makes and a later one reads is an output of the first and an
         input of the second
Keeps    stages, source lines and, but for rows, shapes; constants and views are repeated.
Source   PopTorch user guide, "poptorch.PipelinedExecution".
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Capture, OutputRole, Placeholder
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, root
from ipu_dynamo.passes.graph.builder import call, evaluate, new_input
from ipu_dynamo.passes.micro_batch.placements import Kind, Shard
from ipu_dynamo.passes.micro_batch.split_batch import Split
from ipu_dynamo.program.ir.values import blocks

aten = torch.ops.aten
Phase = Literal["before", "loop", "after"]
PHASES: tuple[Phase, ...] = ("before", "loop", "after")
Joining = Literal["rows", "sum"]


@dataclass(frozen=True)
class Join:
    """How the values that micro-batches make become one.

    Args:
        how: blocks of `rows`, or a sum in the order of micro-batches.
        like: what results, on the whole batch.
    """

    how: Joining
    rows: Shard
    like: Tensor


@dataclass(frozen=True)
class Piece:
    """A capture of one phase.

    Args:
        sources: for each of its inputs, the tensor that it reads: an argument, or a result of an
            earlier piece.
        slices: inputs that are blocks of their source.
        results: what its outputs are called outside, in order.
        joins: for the loop, how each becomes one value.
    """

    phase: Phase
    capture: Capture
    sources: dict[str, str]
    slices: dict[str, Shard]
    results: tuple[str, ...]
    joins: tuple[Join, ...]


@dataclass
class _Draft:
    """A piece under construction; `copies[node, rows]` stands for a block of rows, or all."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[tuple[fx.Node, Shard | None], fx.Node] = field(default_factory=dict)
    inputs: dict[str, tuple[fx.Node, Placeholder]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    slices: dict[str, Shard] = field(default_factory=dict)
    outputs: dict[str, fx.Node] = field(default_factory=dict)
    joins: dict[str, Join] = field(default_factory=dict)


def cut(capture: Capture, split: Split) -> tuple[list[Piece], list[str]]:
    """The pieces that do anything, in order, and where each output of `capture` is found.

    It is a result of a piece, or a placeholder.
    """
    taken = {role.name for role in capture.placeholders}
    cutter = _Cutter(capture, split)
    for node in capture.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.name in taken:
            node._rename(f"{node.name}_value")
        cutter.value(node, cutter.phase_of(node))
    names = [cutter.deliver(node) for node in capture.returned if node is not None]
    wanted = set(names)
    pieces: list[Piece] = []
    for phase in reversed(PHASES):
        piece = cutter.piece(phase, wanted)
        wanted |= set(piece.sources.values())
        if piece.results:
            pieces.insert(0, piece)
    return pieces, names


class _Cutter:
    """Copy every operator to the phase where it runs. Invariant: a value is an output of the draft
    that makes it as soon as a later draft reads it."""

    def __init__(self, capture: Capture, split: Split) -> None:
        self.capture, self.split = capture, split
        self.roles = capture.roles()
        self.drafts: dict[Phase, _Draft] = {phase: _Draft() for phase in PHASES}

    def piece(self, phase: Phase, wanted: set[str]) -> Piece:
        """Finish a draft, with the outputs that are wanted only."""
        draft, capture = self.drafts[phase], self.capture
        results = tuple(name for name in draft.outputs if name in wanted)
        draft.graph.output(tuple(draft.outputs[name] for name in results)).meta["val"] = None
        draft.graph.eliminate_dead_code()
        used = {name: pair for name, pair in draft.inputs.items() if pair[0].users}
        for name, (node, _) in draft.inputs.items():
            if name not in used:
                draft.graph.erase_node(node)
        roles = tuple(role for _, role in used.values())
        piece = replace(
            capture,
            graph=fx.GraphModule(torch.nn.Module(), draft.graph),
            placeholders=roles,
            outputs=tuple(OutputRole("value", str(i)) for i in range(len(results))),
            tensors={
                name: capture.tensors.get(draft.sources[name], node.meta["val"])
                for name, (node, role) in used.items()
                if role.kind != "input"
            },
        )
        return Piece(
            phase=phase,
            capture=piece,
            sources={name: draft.sources[name] for name in used},
            slices={name: rows for name, rows in draft.slices.items() if name in used},
            results=results,
            joins=tuple(draft.joins[name] for name in results) if phase == "loop" else (),
        )

    def phase_of(self, node: fx.Node) -> Phase:
        match self.split.at[node]:
            case Kind.REPLICATE:
                return "before"
            case Kind.DEFERRED:
                return "after"
            case _:
                return "loop"

    def deliver(self, node: fx.Node) -> str:
        """Make a value that is returned an output of the piece that makes it."""
        return self.output(node, self.phase_of(node))

    def output(self, node: fx.Node, phase: Phase) -> str:
        draft = self.drafts[phase]
        if node.op == "placeholder":
            return self.roles[node].name
        if node.name not in draft.outputs:
            draft.outputs[node.name] = self.value(node, phase)
            if phase == "loop":
                draft.joins[node.name] = self.join(node)
        return node.name

    def join(self, node: fx.Node) -> Join:
        value = node.meta["val"]
        match self.split.at[node]:
            case Shard() as rows:
                return Join("rows", rows, value)
            case Kind.PER_MICRO_BATCH:
                each = value.new_empty((self.split.n * value.shape[0], *value.shape[1:]))
                return Join("rows", Shard(0), each)
            case _:
                return Join("sum", Shard(0), value)

    def value(self, node: fx.Node, phase: Phase, rows: Shard | None = None) -> fx.Node:
        """The node that stands for `node` in a phase, or for a block of its `rows`."""
        draft = self.drafts[phase]
        if (node, rows) not in draft.copies:
            draft.copies[node, rows] = self.make(node, phase, rows)
        return draft.copies[node, rows]

    def make(self, node: fx.Node, phase: Phase, rows: Shard | None) -> fx.Node:
        placement, role = self.split.at[node], self.roles.get(node)
        if role is not None:
            if phase == "loop" and isinstance(placement, Shard):
                rows = placement
            return self.take(node, phase, role, rows)
        home = self.phase_of(node)
        if rows is None and (
            home == phase
            or (home == "loop" and phase == "before")  # prepared masks and integers, see the plan
            or (home == "before" and _repeats(node))
        ):
            return self.copy(node, phase)
        if placement is Kind.PER_MICRO_BATCH:
            raise CompileError(
                "a value that every micro-batch has for itself is used after them",
                node=node,
                hint="leave out micro_batches",
            )
        return self.take(node, phase, Placeholder(self.output(node, home), "input"), rows)

    def copy(self, node: fx.Node, phase: Phase) -> fx.Node:
        """Copy an operator; in the loop, with the sizes of a micro-batch."""
        split, graph = self.split, self.drafts[phase].graph
        slices = split.slices.get(node, {}) if phase == "loop" else {}
        sources = {s: self.value(s, phase, slices.get(s)) for s in node.all_input_nodes}
        local = split.args.get(node, node.args) if phase == "loop" else node.args
        args, kwargs = map_arg((local, dict(node.kwargs)), sources.__getitem__)
        new = graph.create_node(node.op, node.target, args, kwargs, node.name)
        new.meta = dict(node.meta)
        if phase == "loop":
            self.size(new, node)
            if node in split.means:
                return call(graph, aten.div.Scalar, new, split.n, origin=new)
        return new

    def size(self, new: fx.Node, node: fx.Node) -> None:
        """Give a node of the loop the value that it has for a micro-batch."""
        if new.target is aten.view.default:
            try:
                new.meta["val"] = evaluate(new)
            except RuntimeError:  # a block of rows is not laid out as the whole
                new.target = aten.reshape.default
        new.meta["val"] = evaluate(new, node)
        placement = self.split.at[node]
        if isinstance(placement, Shard) and isinstance(new.meta["val"], Tensor):
            expected = list(node.meta["val"].shape)
            expected[placement.dim] //= self.split.n
            assert list(new.meta["val"].shape) == expected, f"%{node.name} has a wrong rule"

    def take(self, node: fx.Node, phase: Phase, role: Placeholder, rows: Shard | None) -> fx.Node:
        """The placeholder of a phase for a tensor from outside, or for a block of it."""
        draft, value = self.drafts[phase], node.meta["val"]
        own = phase == "loop" and self.split.at[node] is Kind.PER_MICRO_BATCH
        along = Shard(0) if own else rows
        name = role.name
        while name in draft.inputs and (draft.sources[name], draft.slices.get(name)) != (
            role.name,
            along,
        ):
            name += "'"
        if name in draft.inputs:
            return draft.inputs[name][0]
        kind = role.kind
        if along is not None:
            kind = "input"
        elif phase == "loop" and kind == "input":
            kind = "whole"
        last = next(reversed(draft.inputs.values()), None)
        new = new_input(draft.graph, name, last[0] if last else None)
        new.meta["val"] = value if rows is None else _block(value, rows, self.split.n)
        draft.inputs[name] = new, replace(role, name=name, kind=kind)
        draft.sources[name] = role.name
        if along is not None:
            draft.slices[name] = along
        return new


def _block(value: Tensor, rows: Shard, n: int) -> Tensor:
    """The first of `n` blocks of rows, laid out as the runtime cuts it."""
    with fake_mode_of([value]):
        return blocks(value, rows.dim, rows.outer, n)[0]


def _repeats(node: fx.Node) -> bool:
    """Whether to compute `node` again in each phase: a constant, or a view of an argument."""
    return makes_constant(node) or (is_view(node) and root(node).op == "placeholder")

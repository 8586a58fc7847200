"""Cut a split graph in three: pieces that run before, in each of, and after the micro-batches.

Before   one flat graph for the whole batch, and a Split
After    three captures; what one makes and a later one reads is an output of the first and an
         input of the second
Keeps    stages, source lines and, but for rows, shapes; constants and views are repeated.
Source   PopTorch user guide, "poptorch.PipelinedExecution".
"""

from dataclasses import replace

from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Joint, OutputRole, Placeholder
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, root
from ipu_dynamo.passes.graph.builder import call, evaluate
from ipu_dynamo.passes.graph.extract import Cut, Extraction
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import BatchPieces, SplitCapture
from ipu_dynamo.passes.micro_batch.placements import (
    Join,
    Kind,
    Phase,
    Piece,
    Placements,
    Shard,
    Split,
)
from ipu_dynamo.program.ir.values import blocks

PHASES: tuple[Phase, ...] = ("before", "loop", "after")
BEFORE, LOOP, AFTER = range(3)


def cut(capture: Joint, split: Split) -> tuple[list[Piece], list[str]]:
    """The pieces that do anything, in order, and where each output of `capture` is found.

    It is a result of a piece, or a placeholder.
    """
    cutter = _Cutter(capture, split)
    cutter.fill()
    returned = [node for node in capture.returned if node is not None]
    names = [cutter.cut.inputs.get(node) or cutter.output(node) for node in returned]
    needed = set(names)
    pieces: list[Piece] = []
    for index in (AFTER, LOOP, BEFORE):
        piece = cutter.piece(index, needed)
        needed |= set(piece.sources.values())
        if piece.results:
            pieces.insert(0, piece)
    return pieces, names


class _Cutter(Extraction):
    """Give operators of the loop the sizes of a micro-batch, and its inputs blocks of rows.

    `sources` has the origin of each input, with its block if the input is one.
    """

    def __init__(self, capture: Joint, split: Split) -> None:
        self.capture, self.split, self.roles = capture, split, capture.roles()
        self.sources: dict[int, dict[str, tuple[str, Shard | None, Placeholder]]] = {
            index: {} for index in (BEFORE, LOOP, AFTER)
        }
        taken = {role.name for role in capture.placeholders}
        place = {
            node: _phase(split.at[node])
            for node in capture.graph.graph.nodes
            if node.op not in ("placeholder", "output")
        }
        plan = Cut(
            place=place,
            inputs={node: role.name for node, role in self.roles.items()},
            name=lambda node: f"{node.name}_value" if node.name in taken else node.name,
            repeats=lambda node, index: _repeats(node, place[node], index),
        )
        super().__init__(plan, (BEFORE, LOOP, AFTER))

    def piece(self, index: int, needed: set[str]) -> Piece:
        """Finish a piece, with the outputs that are wanted only."""
        piece = self.pieces[index]
        piece.outputs = {name: node for name, node in piece.outputs.items() if name in needed}
        piece.prune(lambda node: not node.is_impure())
        sources = {name: self.sources[index][name] for name in piece.inputs}
        originals = {self.cut.name(node): node for node in self.cut.place}
        results = tuple(piece.outputs)
        tensors = {
            name: self.capture.report.tensors.get(source, piece.inputs[name].meta["val"])
            for name, (source, _, role) in sources.items()
            if role.kind != "input"
        }
        capture = replace(
            self.capture,
            graph=piece.finish(),
            placeholders=tuple(role for _, _, role in sources.values()),
            outputs=tuple(OutputRole("value", str(i)) for i in range(len(results))),
            report=replace(self.capture.report, tensors=tensors),
        )
        return Piece(
            phase=PHASES[index],
            capture=capture,
            sources={name: source for name, (source, _, _) in sources.items()},
            slices={name: rows for name, (_, rows, _) in sources.items() if rows is not None},
            results=results,
            joins=tuple(self.join(originals[n]) for n in results) if index == LOOP else (),
        )

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

    def copy(self, node: fx.Node, index: int) -> fx.Node:
        """Copy an operator; in the loop, with the sizes of a micro-batch."""
        if index != LOOP:
            return super().copy(node, index)
        split, graph = self.split, self.pieces[index].graph
        rows = split.slices.get(node, {})
        sources = {
            source: self.take(source, index, rows[source])
            if source in rows
            else self.value(source, index)
            for source in node.all_input_nodes
        }
        for source, block in split.first.get(node, {}).items():
            size = source.meta["val"].shape[block.dim] // split.n
            whole = sources[source]
            sources[source] = call(graph, aten.slice.Tensor, whole, block.dim, 0, size, origin=node)
        local = split.args.get(node, node.args)
        args, kwargs = map_arg((local, dict(node.kwargs)), sources.__getitem__)
        new = graph.create_node(node.op, node.target, args, kwargs, node.name)
        new.meta = dict(node.meta)
        self.size(new, node)
        if node in split.means:
            return call(graph, aten.div.Scalar, new, split.n, origin=new)
        return new

    def size(self, new: fx.Node, node: fx.Node) -> None:
        """Give a node of the loop the value that it has for a micro-batch."""
        if new.target in (aten.view.default, aten._unsafe_view.default):
            try:
                new.meta["val"] = evaluate(new)
            except (RuntimeError, ValueError):  # a block of rows is not laid out as the whole
                new.target = aten.reshape.default
        new.meta["val"] = evaluate(new, node)
        placement = self.split.at[node]
        if isinstance(placement, Shard) and isinstance(new.meta["val"], Tensor):
            expected = list(node.meta["val"].shape)
            expected[placement.dim] //= self.split.n
            assert list(new.meta["val"].shape) == expected, f"%{node.name} has a wrong rule"

    def read(self, node: fx.Node, index: int) -> fx.Node:
        """Return a phase's input for a tensor from outside: an argument or another's result."""
        placement = self.split.at[node]
        own = placement is Kind.PER_MICRO_BATCH
        if own and node not in self.roles:
            raise CompileError(
                "a value that every micro-batch has for itself is used after them",
                node=node,
                hint="leave out micro_batches",
            )
        cut_here = index == LOOP and node in self.roles
        rows = placement if cut_here and isinstance(placement, Shard) else None
        return self.take(node, index, Shard(0) if cut_here and own else rows, own=own)

    def take(self, node: fx.Node, index: int, rows: Shard | None, *, own: bool = False) -> fx.Node:
        """The input for a tensor, or for a block of it."""
        source = self.cut.inputs.get(node) or self.output(node)
        name, sources = source, self.sources[index]
        while name in sources and sources[name][:2] != (source, rows):
            name += "'"
        if name not in sources:
            role = replace(self.roles.get(node, Placeholder(source, "input")), name=name)
            if rows is not None:
                role = replace(role, kind="input")
            elif index == LOOP and role.kind == "input":
                role = replace(role, kind="whole")
            sources[name] = source, rows, role
        value = node.meta["val"]
        value = value if rows is None or own else _block(value, rows, self.split.n)
        return self.pieces[index].take(name, {"val": value})


def _phase(placement: Placements) -> int:
    if placement is Kind.REPLICATE:
        return BEFORE
    return AFTER if placement is Kind.DEFERRED else LOOP


def _block(value: Tensor, rows: Shard, n: int) -> Tensor:
    """The first of `n` blocks of rows, laid out as the runtime cuts it."""
    with fake_mode_of([value]):
        return blocks(value, rows.dim, rows.outer, n)[0]


def _repeats(node: fx.Node, owner: int, index: int) -> bool:
    """Whether a phase computes a value of another one itself: a mask or an integer that the plan
    prepared, a constant, or a view of an argument."""
    if (owner, index) == (LOOP, BEFORE):
        return True
    looks = is_view(node) and root(node).op == "placeholder"
    return owner == BEFORE and (makes_constant(node) or looks)


class CutBatch(Pass):
    """The pass."""

    level = "split"
    needed = "micro-batches run a graph of their own"

    def __call__(self, model: SplitCapture) -> BatchPieces:
        pieces, names = cut(model.capture, model.split)
        return BatchPieces(tuple(pieces), tuple(names), model.split)

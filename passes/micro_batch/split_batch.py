"""Decide how a flat graph for a whole batch runs on one micro-batch after the other.

With     n=2, seeds={"x": Shard(0)}
Before   %y = aten.mm(%x: f32[m,k], %w: f32[k,n])  in stage 0, forward
         %l = aten.mean(%y)                        in stage 0, forward
After    the same
         SplitCapture(capture, Split(2, at={
             %x: Shard(0), %w: Kind.REPLICATE, %y: Shard(0), %l: Kind.PARTIAL
         }))
Keeps    what the graph computes on the whole batch, up to the order of sums. Two exceptions: batch
         norm in training uses each micro-batch's statistics, and random numbers are drawn anew.
Source   PopTorch user guide, "poptorch.PipelinedExecution"; batch norm as in GPipe.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, NoReturn

from torch import Tensor, fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.graph_queries import is_view, root
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import SplitCapture
from ipu_dynamo.passes.micro_batch.batch_table import (
    REPLICATED,
    RULES,
    OperatorCall,
    is_linear,
    shape_of,
)
from ipu_dynamo.passes.micro_batch.placements import (
    Kind,
    Labels,
    Placement,
    Placements,
    Row,
    Shard,
    Split,
)

_HINT = (
    "mix the rows of a batch in the loss only, after all layers; name the inputs that are cut in "
    "batch_inputs; or leave out micro_batches"
)


def plan(
    capture: Joint,
    n: int,
    seeds: Mapping[fx.Node, Placement],
    deferred: Collection[str] = (),
) -> Split:
    """Place every value. Reads the graph, changes nothing.

    Args:
        seeds: placeholders that are cut, or that every micro-batch has for itself.
        deferred: names of the backward of operators that forward deferred: it runs before the
            micro-batches.

    Raises:
        CompileError: an operator is not in the table; a layer needs the rows of different
            micro-batches at once; or nothing can be split.
    """
    planner = Planner(n, seeds, deferred)
    for node in capture.graph.graph.nodes:
        if node.op != "output":
            planner.place(node)
    _refuse_layers(capture, planner.split, planner.meetings)
    if capture.alone != "backward":
        _refuse_nothing(planner.split, planner.meetings)
    return planner.split


class Planner:
    """Walk through the graph; `meetings` are operators that need all rows at once."""

    def __init__(
        self, n: int, seeds: Mapping[fx.Node, Placement], deferred: Collection[str]
    ) -> None:
        self.split, self.seeds, self.deferred = Split(n), seeds, deferred
        self.means: dict[fx.Node, frozenset[int]] = {}
        self.meetings: list[fx.Node] = []
        self.prepared: set[fx.Node] = set()  # integers and masks made of inputs, at little cost

    def place(self, node: fx.Node) -> None:
        at = self.split.at
        if node.op == "placeholder":
            at[node] = self.seeds.get(node, Kind.REPLICATE)
        elif node.target is operator.getitem:
            source: Any = node.args[0]
            whole = at[source]
            at[node] = whole[node.args[1]] if isinstance(whole, tuple) else whole  # type: ignore[index]
            if node.args[1] in self.means.get(source, ()):
                self.split.means.add(node)
        else:
            at[node] = self.placement(node, {at[source] for source in node.all_input_nodes})
        if self.is_prepared(node):
            self.prepared.add(node)

    def placement(self, node: fx.Node, kinds: set[Placements]) -> Placements:
        whole = all(map(self.whole_at_start, node.all_input_nodes))
        if kinds <= {Kind.REPLICATE} or (whole and node.name in self.deferred):
            return Kind.REPLICATE
        if node.target in REPLICATED and all(x in self.prepared for x in node.all_input_nodes):
            return Kind.REPLICATE
        if kinds == {Kind.PARTIAL} and is_linear(node):
            return Kind.PARTIAL
        if Kind.PARTIAL in kinds or Kind.DEFERRED in kinds:
            return Kind.DEFERRED
        if node.target not in RULES and node.target not in REPLICATED:
            raise CompileError(
                f"this operator is not in the table of those that work on micro-batches, and it "
                f"reads a part of the batch, so that this cannot run on {self.split.n} of them",
                node=node,
                hint="use other operators, or leave out micro_batches",
                id="micro-batches",
            )
        op = OperatorCall(node, self.split.n, self.split.at)
        row = RULES[node.target](op) if node.target in RULES else None
        placed = None if row is None else self.fit(op, row)
        if placed is None:
            self.meetings.append(node)
            return Kind.DEFERRED
        return placed

    def is_prepared(self, node: fx.Node) -> bool:
        """Whether the whole value can be had before the micro-batches at little cost."""
        value = node.meta["val"]
        integer = isinstance(value, Tensor) and not (
            value.is_floating_point() or value.is_complex()
        )
        sources = node.all_input_nodes
        from_inputs = node.op == "placeholder" or all(x in self.prepared for x in sources)
        cut = isinstance(self.split.at[node], Shard)
        return self.split.at[node] is Kind.REPLICATE or (cut and integer and from_inputs)

    def whole_at_start(self, node: fx.Node) -> bool:
        """Whether all rows of a value are there before the micro-batches."""
        placement = self.split.at[node]
        cut = node.op == "placeholder" and placement is not Kind.PER_MICRO_BATCH
        return cut or placement is Kind.REPLICATE

    def fit(self, op: OperatorCall, row: Row) -> Placements | None:
        """Cut along the label of the operands that are cut; None if a row does not allow it."""
        split, node = self.split, op.node
        cut = {
            (labels[placed.dim], placed.outer)
            for source, labels in row.operands
            if isinstance(placed := split.at[source], Shard) and not isinstance(labels, Kind)
        }
        if len(cut) != 1:
            return None
        ((label, outer),) = cut
        placements: dict[fx.Node, Placement] = {}
        for source, labels in row.operands:
            want = _placed(labels, label, outer, Kind.REPLICATE)
            if label is None or placements.setdefault(source, want) != want:
                return None  # one tensor that would be read in two ways
        changed = {source: placements.get(source, Kind.REPLICATE) for source in op.sources}
        changed = {source: want for source, want in changed.items() if split.at[source] != want}
        slices = {source: want for source, want in changed.items() if isinstance(want, Shard)}
        if len(slices) < len(changed) or any(split.at[x] is not Kind.REPLICATE for x in slices):
            return None
        results = tuple(
            _placed(labels, label, row.outer or outer, Kind.PARTIAL) for labels in row.results
        )
        shapes = [(shape_of(source), want) for source, want in placements.items()]
        shapes += zip(op.shapes, results, strict=True)
        sizes = {shape[want.dim] for shape, want in shapes if isinstance(want, Shard)}
        if len(sizes) > 1 and row.outer is None:
            return None
        split.slices[node] = slices
        blocks = {x: _placed(labels, label, outer, Kind.REPLICATE) for x, labels in row.first}
        split.first[node] = {x: rows for x, rows in blocks.items() if isinstance(rows, Shard)}
        split.args[node] = _local_args(op, row, results[0])
        several = isinstance(node.meta["val"], tuple | list)
        partial = {i for i in row.mean if results[i] is Kind.PARTIAL}
        if several:
            self.means[node] = frozenset(partial)
        elif partial or row.too_large:
            split.means.add(node)
        return results if several else results[0]


def _placed(labels: Labels | Kind, label: object, outer: int, otherwise: Kind) -> Placement:
    if isinstance(labels, Kind):
        return labels
    return Shard(labels.index(label), outer) if label in labels else otherwise


def _local_args(op: OperatorCall, row: Row, result: Placement) -> tuple[Any, ...]:
    """The arguments with the sizes of a micro-batch."""
    args, names = list(op.node.args), list(op.args)
    if row.sizes and isinstance(result, Shard):
        shape = list(op.shapes[0])
        shape[result.dim] //= op.n
        args[names.index(row.sizes)] = shape
    if row.count:
        args[names.index(row.count)] = op.args[row.count] // op.n
    return tuple(args)


def _refuse_nothing(split: Split, meetings: list[fx.Node]) -> None:
    """Raise when no operator works on a part of the batch."""
    loop = [
        node
        for node, placed in split.at.items()
        if node.op != "placeholder" and placed not in (Kind.REPLICATE, Kind.DEFERRED)
    ]
    if any(not is_view(node) for node in loop):
        return
    if meetings:
        problem = "this operator needs all rows of the batch at once, so that nothing is left"
        problem += f" that {split.n} micro-batches could do"
    else:
        problem = "no operator of the graph works on a part of the batch"
    raise CompileError(
        problem, node=meetings[0] if meetings else None, hint=_HINT, id="micro-batches"
    )


def _refuse_layers(capture: Joint, split: Split, meetings: list[fx.Node]) -> None:
    """Raise when a layer, or another stage, has to wait for all micro-batches.

    An operator that reads only sums over the batch is no layer: it has no rows to work on. An
    example is the gradient of a weight that is computed from parameters.
    """
    roles = capture.roles()
    causes: dict[fx.Node, fx.Node] = {node: node for node in meetings}
    sums_only: set[fx.Node] = set()
    for node in capture.graph.graph.nodes:
        if node.op == "output" or split.at[node] is not Kind.DEFERRED:
            continue
        kinds = {split.at[x] for x in node.all_input_nodes if x not in sums_only}
        if kinds <= {Kind.REPLICATE, Kind.PARTIAL}:
            sums_only.add(node)
        sums = [source for source in node.all_input_nodes if split.at[source] is Kind.PARTIAL]
        first = [causes[source] for source in node.all_input_nodes if source in causes]
        cause = causes.setdefault(node, (first or sums or [node])[0])
        bases = [root(source) for source in node.all_input_nodes]
        weights = [roles[x].name for x in bases if x in roles and roles[x].kind == "parameter"]
        if weights and cause is not node and node not in sums_only:
            _refuse(split.n, cause, node, f"the layer with {weights[0]}")
        if cause in meetings and node.meta[STAGE] != cause.meta[STAGE]:
            _refuse(split.n, cause, node, f"stage {node.meta[STAGE]}")


def _refuse(n: int, cause: fx.Node, node: fx.Node, who: str) -> NoReturn:
    backward = "the backward pass of " if node.meta.get(BACKWARD) else ""
    raise CompileError(
        f"this operator needs all rows of the batch at once; {backward}{who} needs its result "
        f"({source_line(node)}), so it cannot work on {n} micro-batches",
        node=cause,
        hint=_HINT,
        id="micro-batches",
    )


class SplitBatch(Pass):
    """The pass.

    Args:
        n: micro-batches.
        seeds: placeholders that are cut, or that every micro-batch has for itself, by name.
        deferred: see `plan`.
    """

    level = "joint"
    needed = "it says what a micro-batch computes"

    n: int = 1
    seeds: Mapping[str, Placement] = field(default_factory=dict)
    deferred: tuple[str, ...] = ()

    def __call__(self, capture: Joint) -> SplitCapture:
        nodes = capture.placeholder_nodes
        seeds = {node: self.seeds[node.name] for node in nodes if node.name in self.seeds}
        return SplitCapture(capture, plan(capture, self.n, seeds, self.deferred))

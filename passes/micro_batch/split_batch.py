"""Decide how a flat graph for a whole batch runs on one micro-batch after the other.

Before   %y = aten.mm(%x, %w); %l = aten.mean(%y)             for a batch of 8 rows
After    %y: rows along dim 0; %l: the sum over micro-batches of their means; %l / 4 follows them
Keeps    what the graph computes on the whole batch, up to the order of sums. Two exceptions: batch
         norm in training uses each micro-batch's statistics, and random numbers are drawn anew.
Source   PopTorch user guide, "poptorch.PipelinedExecution"; batch norm as in GPipe.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Capture
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.graph_queries import is_view, root
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.micro_batch.batch_layers import MEAN, SUM, reduction
from ipu_dynamo.passes.micro_batch.batch_placements import (
    Answer,
    Kind,
    Placement,
    Placements,
    Question,
)
from ipu_dynamo.passes.micro_batch.batch_rules import (
    BATCH_NORMS,
    LOSS_GRADIENTS,
    LOSSES,
    NLL,
    answer,
)
from ipu_dynamo.passes.micro_batch.batch_shapes import MEANS

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_LINEAR = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.clone.default}
_FILLED = {aten.new_zeros.default: 0, aten.new_ones.default: 1}


@dataclass
class Split:
    """The decision.

    Args:
        n: micro-batches.
        at: the placement of every node.
        answers: how operators on rows run on a micro-batch.
    """

    n: int
    at: dict[fx.Node, Placements] = field(default_factory=dict)
    answers: dict[fx.Node, Answer] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Placement:
        """The placement of a node that is one tensor, or a list of tensors with the same one."""
        found = self.at[node]
        assert not isinstance(found, tuple)
        return found


def plan(capture: Capture, n: int, seeds: Mapping[fx.Node, Placement]) -> Split:
    """Place every value; means over the batch become sums and a division after them.

    Args:
        seeds: placeholders that have rows, or one value for each micro-batch.

    Raises:
        CompileError: a layer needs the rows of different micro-batches at once.
    """
    planner = _Planner(capture, n)
    for node in capture.graph.graph.nodes:
        if node.op == "placeholder":
            planner.split.at[node] = seeds.get(node, Kind.WHOLE)
        elif node.op != "output":
            planner.place(node)
    _refuse_layers(capture, planner.split, planner.meetings)
    capture.graph.recompile()
    return planner.split


class _Planner:
    """Walk through the graph; `meetings` are operators that need all rows at once."""

    def __init__(self, capture: Capture, n: int) -> None:
        self.graph, self.backward = capture.graph.graph, capture.alone == "backward"
        self.split = Split(n)
        self.meetings: list[fx.Node] = []

    def place(self, node: fx.Node) -> None:
        """Place an operator; what is inserted behind it is visited later."""
        at = self.split.at
        if node.target in _FILLED:
            _make_constant(self.graph, node)
            return
        if node.target is operator.getitem:
            held = at[node.args[0]]  # type: ignore[index]
            at[node] = held[node.args[1]] if isinstance(held, tuple) else held  # type: ignore[index]
            if _running_statistic(node) and at[node] is Kind.SUM:
                _divide(self.graph, node, self.split.n)
            return
        kinds = {at[source] for source in node.all_input_nodes}
        if kinds == {Kind.SUM} and (is_view(node) or node.target in _LINEAR):
            at[node] = Kind.SUM
        elif Kind.SUM in kinds or Kind.LATE in kinds:
            at[node] = Kind.LATE
        elif kinds <= {Kind.WHOLE}:
            at[node] = Kind.WHOLE
        else:
            self._place_rows(node)

    def _place_rows(self, node: fx.Node) -> None:
        at, n = self.split.at, self.split.n
        found = answer(Question(node, n, at))
        if found is None:
            lifted = all(self._known_before(source) for source in node.all_input_nodes)
            at[node] = Kind.WHOLE if lifted else Kind.LATE
            if not lifted:
                self.meetings.append(node)
            return
        if node.target in NLL and node.args[3] == MEAN and found.results == (Kind.SUM, Kind.SUM):
            _sum_up(self.graph, node)
            return
        at[node], self.split.answers[node] = found.results, found
        averages = node.target in MEANS or (node.target in LOSSES and reduction(node) == MEAN)
        if averages and found.results is Kind.SUM:
            _divide(self.graph, node, n)
        if node.target in LOSS_GRADIENTS and reduction(node) == MEAN:
            gradient = node.args[0]
            with self.graph.inserting_before(node):
                part = call(self.graph, aten.div.Scalar, gradient, n, origin=node)
            self.place(part)
            node.update_arg(0, part)

    def _known_before(self, node: fx.Node) -> bool:
        """Whether the whole of `node` can be had before the micro-batches at little cost."""
        if self.split.at[node] in (Kind.WHOLE, Kind.EACH):
            return self.split.at[node] is Kind.WHOLE
        if node.op == "placeholder":
            return True
        value = node.meta["val"]
        small = not self.backward and isinstance(value, Tensor) and not _floating(value)
        return (small or is_view(node)) and all(map(self._known_before, node.all_input_nodes))


def _running_statistic(node: fx.Node) -> bool:
    source, index = node.args
    return isinstance(source, fx.Node) and source.target in BATCH_NORMS and index in (3, 4)


def _divide(graph: fx.Graph, node: fx.Node, by: int) -> None:
    """Divide a sum over micro-batches by their number."""
    with graph.inserting_after(node):
        mean = call(graph, aten.div.Scalar, node, by, origin=node)
    node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def _sum_up(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a mean over the targets that count by a sum, which their weight divides."""
    args = [SUM if i == 3 else arg for i, arg in enumerate(node.args)]
    scores: Any = args[0]
    dtype = scores.meta["val"].dtype
    with graph.inserting_before(node.next):
        if dtype in _HALVES:  # whose sums would overflow
            wide = [
                call(graph, aten._to_copy.default, arg, origin=node, dtype=torch.float32)
                if i in (0, 2) and isinstance(arg, fx.Node)
                else arg
                for i, arg in enumerate(args)
            ]
            args = wide
        both = call(graph, node.target, *args, origin=node)
        total, weight = (call(graph, operator.getitem, both, i, origin=node) for i in (0, 1))
        mean = call(graph, aten.div.Tensor, total, weight, origin=node)
        if dtype in _HALVES:
            mean = call(graph, aten._to_copy.default, mean, origin=node, dtype=dtype)
            weight = call(graph, aten._to_copy.default, weight, origin=node, dtype=dtype)
    for user in list(node.users):
        user.replace_all_uses_with(mean if user.args[1] == 0 else weight)
        graph.erase_node(user)
    graph.erase_node(node)


def _floating(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _make_constant(graph: fx.Graph, node: fx.Node) -> None:
    """`new_zeros` and its like need no tensor but for dtype and device."""
    value, fill = node.meta["val"], _FILLED[node.target]  # type: ignore[index]
    like = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_after(node):
        constant = call(graph, aten.full.default, list(value.shape), fill, origin=node, **like)
    node.replace_all_uses_with(constant)
    graph.erase_node(node)


def _refuse_layers(capture: Capture, split: Split, meetings: list[fx.Node]) -> None:
    """Raise when a layer, or another stage, has to wait for all micro-batches."""
    roles = capture.roles()
    cause: dict[fx.Node, fx.Node] = {node: node for node in meetings}
    for node in capture.graph.graph.nodes:
        if node.op == "output" or split.at[node] is not Kind.LATE:
            continue
        reads = [cause[source] for source in node.all_input_nodes if source in cause]
        if node not in cause and reads:
            cause[node] = reads[0]
        weights = [
            roles[base].name
            for source in node.all_input_nodes
            if (base := root(source)) in roles and roles[base].kind == "parameter"
        ]
        first = cause.get(node)
        if weights and node is not first:
            _refuse(split.n, first or _summed_up(node, split), node, f"the layer with {weights[0]}")
        if first is not None and node.meta[STAGE] != first.meta[STAGE]:
            _refuse(split.n, first, node, f"stage {node.meta[STAGE]}")


def _summed_up(node: fx.Node, split: Split) -> fx.Node:
    """The sum over the batch that `node` waits for."""
    waiting = list(node.all_input_nodes)
    for source in waiting:
        if split.at[source] is Kind.SUM:
            return source
        waiting += [s for s in source.all_input_nodes if split.at[s] in (Kind.SUM, Kind.LATE)]
    return node


def _refuse(n: int, cause: fx.Node, node: fx.Node, who: str) -> None:
    backward = "the backward pass of " if node.meta.get(BACKWARD) else ""
    raise CompileError(
        f"this operator needs all rows of the batch at once, or is not known to do without; "
        f"{backward}{who} needs its result ({source_line(node)}), so it cannot work on "
        f"{n} micro-batches",
        node=cause,
        hint="mix the rows of a batch in the loss only, after all layers; or leave out "
        "micro_batches",
    )

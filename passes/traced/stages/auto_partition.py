"""Cut a model without blocks into stages that take equally long.

With     strategy=Strategy("sharded", ipus=2, costs=((1.0, 0.0), (2.0, 0.0), (3.0, 0.0)))
Before   %h = aten.relu(%x: f32[n])
         %g = aten.exp(%h)
         %y = aten.tan(%g)
After    %h = aten.relu(%x)  in stage 0
         %g = aten.exp(%h)   in stage 0
         %y = aten.tan(%g)   in stage 1            # it takes as long as the two before
         capture.ipus = {0: 0, 1: 1}
Keeps    every operator and its order.
Source   PopTorch user guide, "Parallel execution strategies": a pipeline is as fast as its slowest
         stage.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from operator import getitem

from torch import Tensor, fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint, Traced
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.graph_queries import nbytes, owner, written_arguments
from ipu_dynamo.ops.marks.markers import begin_block
from ipu_dynamo.options import Costs, Strategy
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.stages.even_cut import CutProblem, cut
from ipu_dynamo.passes.traced.stages.placement import check_size, computes, prepare_order


def plan(costs: Costs, crossing: Sequence[int], stages: int, *, again: bool) -> tuple[int, ...]:
    """Where each stage but the first begins: positions among the operators.

    The slowest stage is as fast as it can be, within 1 %. Of such cuts, one with few bytes across
    it is taken.

    Args:
        costs: seconds of every operator, forward and backward.
        crossing: bytes that go from operators before each position to those after it.
        again: all stages but the last compute their forward pass again in the backward pass.
    """
    row = CutProblem(
        [f + b + again * f for f, b in costs],
        seconds_in_last=[f + b for f, b in costs],
        crossing=crossing,
    )
    cuts = cut(row, stages)
    assert cuts is not None, "there are as many operators as stages"
    return cuts


def crossing_bytes(operators: Sequence[fx.Node]) -> list[int]:
    """For every position, the bytes that operators before it make and later ones read."""
    position = {node: i for i, node in enumerate(operators)}
    change = [0] * (len(operators) + 1)
    for node, place in position.items():
        for value in _values(node):
            read = max((position[user] for user in value.users if user in position), default=place)
            if read > place:
                change[place + 1] += nbytes(value)
                change[read + 1] -= nbytes(value)
    return list(accumulate(change))


def _values(node: fx.Node) -> list[fx.Node]:
    """The result of an operator; of one that gives several, as a loop does, each that is taken."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if user.target is getitem]


def changed_together(capture: Traced, operators: Sequence[fx.Node]) -> list[range]:
    """For each variable that the model changes, the operators from its first use to its last.

    In a pipeline two stages work on different micro-batches, so they must be of one stage.
    """
    position = {node: i for i, node in enumerate(operators)}
    lasting = {node for node, role in capture.roles().items() if role.kind != "input"}
    changed = {_memory(node) for user in operators for node in written_arguments(user)}
    uses: dict[fx.Node, list[int]] = {}
    for node, place in position.items():
        for source in lasting.intersection(map(_memory, node.all_input_nodes)):
            uses.setdefault(source, []).append(place)
    return [range(min(of), max(of) + 1) for node, of in uses.items() if node in changed]


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a value shares, also for a result of an operator that writes it."""
    while (base := owner(node)) is not node or written_arguments(node):
        node = base if base is not node else written_arguments(node)[0]
    return node


class AutoPartition(Pass):
    """The pass, for a strategy with `ipus`.

    Args:
        micro_batches: that run per update (training) or per call (inference).
        again: stages but the last compute their forward pass again.
    """

    level = "traced"

    strategy: Strategy
    micro_batches: int
    again: bool

    def __call__(self, capture: Traced) -> bool:
        stages = self.strategy.ipus
        assert stages is not None
        if any(STAGE in node.meta for node in capture.graph.graph.nodes):
            return False
        operators = operators_of(capture)
        costs = self.strategy.costs
        if len(operators) < stages:
            raise CompileError(
                f"a model of {len(operators)} operators cannot be cut into {stages} stages",
                hint="use fewer IPUs",
            )
        if len(costs) != len(operators):
            raise CompileError(
                f"the costs are of {len(costs)} operators, and the model has {len(operators)}",
                hint="measure them for this model: leave strategy.costs out",
            )
        named = capture.training and self.strategy.order_name
        if self.strategy.kind == "pipelined" and not named:
            check_size(stages, stages, self.micro_batches, capture.training)
        together = changed_together(capture, operators) if self.strategy.kind == "pipelined" else []
        inner = {place for of in together for place in of[1:]}
        begins = [place for place in range(len(operators)) if place not in inner]
        if len(begins) < stages:
            raise CompileError(
                f"a pipeline of {stages} stages would be cut between uses of a variable that the "
                "model changes",
                hint="use fewer IPUs, or the sharded strategy",
                id="pipeline",
            )
        ends = [*begins[1:], len(operators)]
        summed = [
            (sum(f for f, _ in costs[first:end]), sum(b for _, b in costs[first:end]))
            for first, end in zip(begins, ends, strict=True)
        ]
        crossing = crossing_bytes(operators)
        crossing = [crossing[place] for place in (*begins, len(operators))]
        again = self.again and capture.training
        cuts = [begins[cut] for cut in plan(tuple(summed), crossing, stages, again=again)]
        _place(capture, operators, [bisect_right(cuts, i) for i in range(len(operators))])
        prepare_order(capture, self.strategy, self.micro_batches)
        return True


def operators_of(capture: Traced) -> list[fx.Node]:
    """Return the operators between which a cut is possible, in order.

    Raises:
        CompileError: the model has blocks.
    """
    for node in capture.graph.graph.find_nodes(op="call_function", target=begin_block):
        raise CompileError(
            f"block {node.args[0]!r} begins here, but the strategy cuts the model by itself",
            node=node,
            hint="take the blocks out, or leave strategy.ipus out",
            id="block",
        )
    return [node for node in capture.graph.graph.nodes if computes(node)]


def _place(capture: Traced, operators: Sequence[fx.Node], stages: Sequence[int]) -> None:
    """Write the stages to the operators, and to nodes that take a result out of a tuple."""
    for node, stage in zip(operators, stages, strict=True):
        node.meta[STAGE] = stage
    for node in capture.graph.graph.nodes:
        if STAGE not in node.meta and node.op == "call_function":
            source = node.args[0] if node.args else None
            if isinstance(source, fx.Node) and STAGE in source.meta:
                node.meta[STAGE] = source.meta[STAGE]
    capture.ipus = {stage: stage for stage in sorted(set(stages))}


def one_stage_each(capture: Traced) -> Traced:
    """Copy a capture, before any pass, and make every operator a stage of its own.

    After differentiation the stages say which operator each node of the joint graph comes from.
    """
    graph = deepcopy(capture.graph.graph)  # the nodes' fake tensors stay shared
    copied = replace(
        capture, graph=fx.GraphModule(capture.graph, graph), report=replace(capture.report)
    )
    operators = operators_of(copied)
    _place(copied, operators, range(len(operators)))
    return copied


def costs_of(differentiated: Joint, seconds: Callable[[fx.Node], float]) -> Costs:
    """Return the forward and backward costs of each operator, from the costs of graph nodes.

    Args:
        differentiated: made by `one_stage_each` and the passes.
    """
    totals = [[0.0, 0.0] for _ in differentiated.ipus]
    for node in differentiated.graph.graph.nodes:
        if STAGE in node.meta:
            totals[node.meta[STAGE]][bool(node.meta[BACKWARD])] += seconds(node)
    return tuple((forward, backward) for forward, backward in totals)

"""Compute forward values again in the backward pass, to keep fewer of them.

With     mode="stages"
Before   capture.training = True
         capture.ipus = {0: 0, 1: 1}
         %h = aten.tanh(%x: f32[n])                in stage 0, forward
         %l = aten.sum(%h)                         in stage 1, forward
         %g = aten.tanh_backward(%d: f32[n], %h)   in stage 0, backward
         return (%l, %g)
After    %h = aten.tanh(%x)                        in stage 0, forward
         %l = aten.sum(%h)                         in stage 1, forward
         %a = aten.tanh(%x)   in stage 0, backward  with meta["ipu.recomputed"] = True
         %g = aten.tanh_backward(%d, %a)           in stage 0, backward
Keeps    values, to the last bit on one engine, random ones too, since those are counted; shapes,
         dtypes, stages, source lines. Marks of `recomputation_checkpoint` are used up.
Source   PopTorch user guide, "poptorch.recomputationCheckpoint" and pipelined execution; Chen et
         al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from torch import fx

from ipu_dynamo import noted_warnings
from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.ops.graph_queries import owner
from ipu_dynamo.ops.marks.markers import recomputation_checkpoint_op
from ipu_dynamo.passes.graph.liveness import Again, peak_bytes
from ipu_dynamo.passes.joint.recomputation.minimum_cut import most, repeatable
from ipu_dynamo.passes.joint.recomputation.recompute_cuts import evenly, forward_of, narrow_places
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.program import RECOMPUTED

Mode = Literal["off", "stages", "all"]


def plan(graph: fx.Graph, stages: Iterable[int], saved: set[fx.Node]) -> Again:
    """Map backward operators to the nodes to repeat before them: inputs not repeated earlier.

    Args:
        stages: those that recompute.
        saved: forward values that are kept although a stage in `stages` makes them.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    again: dict[fx.Node, tuple[fx.Node, ...]] = {}
    done: set[fx.Node] = set()
    wanted_stages = set(stages)
    for node in graph.nodes:
        stage = node.meta.get(STAGE)
        if node.op != "call_function" or not node.meta[BACKWARD] or stage not in wanted_stages:
            continue
        repeated: set[fx.Node] = set()
        stack = list(node.all_input_nodes)
        while stack:
            source = stack.pop()
            if source in repeated or source in done or not _repeatable(source, stage, saved):
                continue
            repeated.add(source)
            stack += source.all_input_nodes
        if repeated:
            done |= repeated
            again[node] = tuple(sorted(repeated, key=order.__getitem__))
    return again


def _repeatable(node: fx.Node, stage: int, saved: set[fx.Node]) -> bool:
    if node.op != "call_function" or node.meta[BACKWARD] or node.meta.get(STAGE) != stage:
        return False
    return owner(node) not in saved and repeatable(node)


def apply(graph: fx.Graph, again: Again) -> None:
    """Insert the repetitions, and let the backward operators of their stage read them."""
    copies: dict[fx.Node, fx.Node] = {}
    for before, nodes in again.items():
        with graph.inserting_before(before):
            for node in nodes:
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
                copies[node].meta = {**node.meta, BACKWARD: True, RECOMPUTED: True}
    for node, copy in copies.items():
        for user in list(node.users):
            theirs = user.meta.get(STAGE) == node.meta[STAGE]
            if user.op == "call_function" and user.meta[BACKWARD] and theirs:
                user.replace_input_with(node, copy)


class Recompute(GraphPass):
    """The pass.

    Args:
        mode: which stages recompute: none, all but the last (whose backward pass follows at once),
            or all.
        budget: bytes that a micro-batch may need at its peak besides variables and inputs. Of the
            values that fit, those that save the most time are kept. None: recompute from
            checkpoints, and if the model marks none, from places that few values cross. In the last
            stage keep values that do not raise that peak.
    """

    level = "joint"

    mode: Mode = "off"
    budget: int | None = None

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        marked = _take_marks(graph)
        capture.checkpointed |= bool(marked)
        last = max(capture.ipus)
        stages = range({"off": 0, "stages": last, "all": last + 1}[self.mode])
        repeated = any(node.meta.get(RECOMPUTED) for node in graph.nodes)
        again: Again = {}
        if capture.training and not repeated:
            again = self._choose(capture, stages, {owner(node) for node in marked})
        apply(graph, again)
        return bool(marked) or bool(again)

    def _choose(self, capture: Joint, stages: range, marked: set[fx.Node]) -> Again:
        graph = capture.graph.graph
        last = max(capture.ipus)
        if self.mode != "all":
            return plan(graph, stages, marked)
        if self.budget is not None and peak_bytes(capture) <= self.budget:
            return {}
        saved = set(marked)
        for stage in stages:
            nodes = forward_of(graph, stage)
            if stage == last and not marked.intersection(nodes):
                saved |= _best_cut(capture, stages, saved, nodes)
        if self.budget is not None:
            return _within(capture, stages, stages, saved, self.budget)
        peak = peak_bytes(capture, plan(graph, stages, saved))
        return _within(capture, stages, stages[-1:], saved, peak)


def _take_marks(graph: fx.Graph) -> list[fx.Node]:
    """Remove the marks; return the marked nodes."""
    marked = []
    for node in graph.find_nodes(op="call_function", target=recomputation_checkpoint_op):
        (source,) = node.all_input_nodes
        graph.erase_node(node)
        marked.append(source)
    return marked


def _best_cut(
    capture: Joint, stages: range, saved: set[fx.Node], nodes: list[fx.Node]
) -> set[fx.Node]:
    """Values to keep of a stage without marks: the number of cuts with the lowest peak."""
    places = narrow_places(nodes)
    best: set[fx.Node] = set()
    lowest = None
    for count in _counts(len(places)):
        kept = set(evenly(places, nodes, count))
        peak = peak_bytes(capture, plan(capture.graph.graph, stages, saved | kept))
        if lowest is None or peak < lowest:
            best, lowest = kept, peak
    return best


def _counts(most: int) -> Iterator[int]:
    """Numbers up to `most`, a quarter apart: 0, 1, 2, 3, 4, 5, 6, 8, 10, ..."""
    count = 0
    while count < most:
        yield count
        count = max(count + 1, count * 5 // 4)
    yield most


def _within(capture: Joint, stages: range, open_: range, saved: set[fx.Node], budget: int) -> Again:
    """Keep more values of the stages `open_`, as long as the peak is within `budget`."""
    graph = capture.graph.graph

    def needs(kept: set[fx.Node]) -> int:
        return peak_bytes(capture, plan(graph, stages, saved | kept))

    kept = most(graph, open_, saved, needs, max(budget, needs(set())))
    if (least := needs(kept)) > budget:
        noted_warnings.warn(
            f"recompute_budget is {budget} bytes, and a micro-batch needs {least} even if all that "
            f"can be is computed again",
        )
    return plan(graph, stages, saved | kept)

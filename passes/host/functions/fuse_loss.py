"""Compute the loss of a serialised product and its gradients in one sweep over rows.

Before   %l, %total, %log_sum = ipu.serialized_loss(%x, %b, %t, 1, -100, "output_channels", 16)
         %dx = ipu.serialized_loss_backward_(%one, %x, %b, %t, %total, %log_sum, ..., %w_grad, ...)
After    %l, %dx = ipu.serialized_loss_step_(%one, %x, %b, %t, 1, -100, 16, ..., %w_grad, ...)
Keeps    shapes, dtypes, source lines; values up to the order of sums. The logits are computed once
         instead of twice: three products instead of four.
Source   the loop of `serialize_loss`; the sweep is our own.
"""

from dataclasses import dataclass
from functools import partial
from operator import getitem

from torch import fx

from ipu_dynamo.ops.graph_queries import needed_for, writes
from ipu_dynamo.ops.serialized_loss import (
    CUTS_ROWS,
    serialized_loss,
    serialized_loss_backward_,
    serialized_loss_step_,
)
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.host.functions.rewrite_functions import rewrite_functions
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.tune.costs import FEWEST_BLOCKS, ROWS_OF_A_BLOCK


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """A loss and its gradients that one sweep can compute.

    Args:
        loss: the loop that computes the loss.
        gradients: the loop that computes the gradients, and writes that of the weight.
        earlier: operators after `loss` that compute the gradient of its result, in order.
        blocks: of rows.
    """

    loss: fx.Node
    gradients: fx.Node
    earlier: tuple[fx.Node, ...]
    blocks: int


def plan(graph: fx.Graph, *, all_sizes: bool = False) -> FusedLoss | None:
    """The first sweep of a function, where forward and backward pass are one; reads its graph only.

    One sweep may prevent another: each of two losses that are multiplied is the gradient of the
    other.

    Args:
        all_sizes: also where blocks have few rows.
    """
    for loss in graph.find_nodes(op="call_function", target=serialized_loss):
        blocks, gradients = _blocks(loss, all_sizes=all_sizes), _gradients(loss)
        if blocks and gradients is not None:
            earlier = _earlier(loss, gradients.args[0])
            if earlier is not None:
                return FusedLoss(loss, gradients, earlier, blocks)
    return None


def _blocks(loss: fx.Node, *, all_sizes: bool) -> int:
    """How many blocks a sweep over rows has; 0 where the loops should stay.

    As many as were asked for, if each has enough rows. If not, and the user cut rows, a quarter of
    the logits in memory is still worth it.
    """
    x, factor = loss.args[0], loss.args[6]
    assert isinstance(x, fx.Node)
    assert isinstance(factor, int)
    rows: int = x.meta["val"].shape[0]
    if all_sizes:
        return min(factor, rows)
    blocks = min(factor, rows // ROWS_OF_A_BLOCK)
    enough = blocks >= FEWEST_BLOCKS and loss.meta.get(CUTS_ROWS, False)
    return blocks if blocks == factor or enough else 0


def _gradients(loss: fx.Node) -> fx.Node | None:
    """Return the loop that computes the gradients, if only it reads the results of the first."""
    readers = {reader for item in loss.users if item.args[1] != 0 for reader in item.users}
    if len(readers) != 1:
        return None
    (reader,) = readers
    return reader if reader.target is serialized_loss_backward_ else None


def _earlier(loss: fx.Node, start: object) -> tuple[fx.Node, ...] | None:
    """Return the operators after `loss` that compute `start`; None: they cannot move before it."""
    assert isinstance(start, fx.Node)
    needed = needed_for([start])
    nodes = list(loss.graph.nodes)
    earlier = tuple(node for node in nodes[nodes.index(loss) :] if node in needed)
    return None if loss in needed or any(map(writes, earlier)) else earlier


def apply(graph: fx.Graph, fused: FusedLoss) -> None:
    """Put the sweep in the place of the first loop."""
    for node in fused.earlier:
        fused.loss.prepend(node)
    start, x, rhs, target, _, _, reduction, ignored, _, _, *rest = fused.gradients.args
    with graph.inserting_before(fused.loss):
        results = call(
            graph,
            serialized_loss_step_,
            *(start, x, rhs, target, reduction, ignored, fused.blocks, *rest),
            origin=fused.loss,
        )
        loss, of_x = (call(graph, getitem, results, i, origin=fused.loss) for i in range(2))
    fused.gradients.replace_all_uses_with(of_x)
    graph.erase_node(fused.gradients)
    for item in list(fused.loss.users):
        if item.args[1] == 0:
            item.replace_all_uses_with(loss)
        graph.erase_node(item)
    graph.erase_node(fused.loss)
    if not of_x.users:
        graph.erase_node(of_x)


class FuseLoss(Pass):
    """The pass. `forced`: whether to, however few rows a block has."""

    level = "host"
    acts_on = (serialized_loss,)
    choices = (True, False)

    forced: bool | None = None

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        if self.forced is False:
            return False
        decision = Decision(self.name, "forward and backward in one pass over rows", of="losses")
        planned = partial(plan, all_sizes=self.forced is True)

        def fuse(graph: fx.Graph) -> None:
            """Fuse the losses of a function, one after the other."""
            while (fused := planned(graph)) is not None:
                apply(graph, fused)

        return rewrite_functions(host, fuse, planned, decision)

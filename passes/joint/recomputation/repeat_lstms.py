"""Run LSTM layers again in the backward pass, in place of keeping their gates.

Before   %l = ipu.lstm(%x: f32[m,n,k], %h: f32[n,k], %c: f32[n,k], %v: f32[4*k,k], %w: f32[4*k,k],
                       None, None, None, None, False, True)         in forward
         %y = %l[0]                                                 in forward
         %gates = %l[3]                                             in forward
         %cells = %l[4]                                             in forward
         %b = ipu.lstm_backward(%d: f32[m,n,k], None, None, %x, %h, %c, %v, %w, None, None,
                                %y, %gates, %cells, False, True, True)  in backward
         return (%y, %b[0])
After    %l = ipu.lstm(%x, %h, %c, %v, %w, None, None, None, None, False, True)  in forward
         %y = %l[0]                                                 in forward
         %gates = %l[3]                                             in forward
         %cells = %l[4]                                             in forward
         %a = ipu.lstm(%x, %h, %c, %v, %w, None, None, None, None, False, True)
         %o = %a[0]
         %g = %a[3]
         %s = %a[4]
         %a, %o, %g, %s  in backward  with meta["ipu.recomputed"] = True
         %a, %o, %g, %s  with meta["partitioner_tag"] = "must_be_in_backward"
         %b = ipu.lstm_backward(%d, None, None, %x, %h, %c, %v, %w, None, None,
                                %o, %g, %s, False, True, True)      in backward
         return (%y, %b[0])
Keeps    values, stages and source lines. Large layers stay, those that oneDNN has no operator for,
         and those whose forward and backward are one function.
Source   Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

The data that oneDNN keeps for its gradients belongs to this machine, and is no value of a program.
If forward and backward are two functions, a small layer of oneDNN can run twice and keep nothing.
That is faster than a layer of operators for each step, which keeps its gates. In a large layer the
operators cost little compared with their matrix products, and it stays.
"""

from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE, Joint
from ipu_dynamo.ops.private.node_meta import ONLY_BACKWARD_TAG, TAG
from ipu_dynamo.ops.recurrent.lstm import lstm, lstm_backward
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.program import RECOMPUTED

# Multiplications of a time step up to which a layer runs again. Measured on one core, forward and
# backward, times eager's, without and with: 2 layers, batch 4, 16 wide (8 thousand): 22.6, 1.35;
# batch 32, 128 wide (4.2 million): 1.31, 1.14; batch 16, 256 wide (8.4 million): 1.17, 1.19;
# batch 64, 256 wide (33.6 million): 1.10, 1.22.
MOST_REPEATED = 6_000_000


@dataclass(frozen=True, slots=True)
class RecomputedLstm:
    """The decision to run `forward` again before `backward`, which reads its saved values."""

    forward: fx.Node
    backward: fx.Node


class RepeatLstms(GraphPass):
    """The pass.

    Args:
        apart: forward and backward are functions of their own in every stage.
    """

    level = "joint"
    acts_on = (lstm_backward,)

    apart: bool = False

    def rewrite(self, capture: Joint) -> bool:
        joined = None if self.apart or not capture.joined else max(capture.ipus)
        layers = plan(capture.graph.graph, joined)
        for layer in layers:
            apply(capture.graph.graph, layer)
        return bool(layers)


def plan(graph: fx.Graph, joined: int | None) -> list[RecomputedLstm]:
    """The layers to run again. Reads the graph only.

    Args:
        joined: the stage whose forward and backward are one function, if there is one.
    """
    layers = []
    for backward in graph.find_nodes(op="call_function", target=lstm_backward):
        gates = backward.args[11]
        assert isinstance(gates, fx.Node)
        forward = gates.args[0]
        if not isinstance(forward, fx.Node) or forward.target is not lstm:
            continue  # saved by a forward pass that is another program
        is_forward = not forward.meta.get(BACKWARD)
        in_one = joined is not None and forward.meta.get(STAGE) == joined
        if is_forward and not in_one and has_onednn_layer(forward) and _is_small(forward):
            layers.append(RecomputedLstm(forward, backward))
    return layers


def has_onednn_layer(node: fx.Node) -> bool:
    """Whether oneDNN has a layer for an `ipu.lstm`: float32, no projection, no lengths."""
    x, *_, wp, lengths, _, _ = node.args
    assert isinstance(x, fx.Node)
    value = x.meta["val"]
    if wp is not None or lengths is not None:
        return False
    return bool(value.dtype == torch.float32 and value.device.type == "cpu" and value.numel())


def _is_small(node: fx.Node) -> bool:
    x, wi, wh = (node.args[i].meta["val"].shape for i in (0, 3, 4))  # type: ignore[union-attr]
    return bool(x[1] * wi[0] * (wi[1] + wh[1]) <= MOST_REPEATED)


def apply(graph: fx.Graph, layer: RecomputedLstm) -> None:
    """Insert the layer and its results before its backward operator, which reads those."""
    forward, backward = layer.forward, layer.backward
    again = {BACKWARD: True, RECOMPUTED: True, TAG: ONLY_BACKWARD_TAG}
    with graph.inserting_before(backward):
        copy = graph.node_copy(forward)
        copy.meta = {**forward.meta, **again}
        for part in [part for part in backward.all_input_nodes if part.args[:1] == (forward,)]:
            result = graph.call_function(getitem, (copy, part.args[1]))
            result.meta = {**part.meta, **again}
            backward.replace_input_with(part, result)

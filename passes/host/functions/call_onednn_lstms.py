"""Let oneDNN compute LSTM layers, forward and backward in one function, or forward alone.

Before   %l = ipu.lstm(%x, %h, %c, ..., True);  %gates = getitem(%l, 3)
         %b = ipu.lstm_backward(%d, ..., %gates, %cells, ...)
After    %l = ipu.onednn_lstm(%x, %h, %c, ..., 819200);  %workspace = getitem(%l, 3)
         %b = ipu.onednn_lstm_backward(%x, ..., %workspace, %d, ...)
Keeps    source lines, shapes; values up to the order of sums. If the gates leave the function, the
         layer stays as it is: a workspace is for this machine alone. `RepeatLstms` prevents that.
         Layers of other types, with projections, or with lengths stay, too.
Source   PyTorch's own LSTM on the CPU; `python -m benchmarks recurrent_lstm` compares them.
"""

from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from ipu_dynamo.capture.private.tracing import outside_modes
from ipu_dynamo.ops.recurrent.lstm import lstm, lstm_backward
from ipu_dynamo.ops.recurrent.onednn_lstm import (
    onednn_lstm,
    onednn_lstm_backward,
    workspace_nbytes,
)
from ipu_dynamo.ops.recurrent.pairs import SAVED
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.host.functions.rewrite_functions import rewrite_functions
from ipu_dynamo.passes.joint.recomputation.repeat_lstms import has_onednn_layer
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Decision, HostProgram

_STATES = 1, 2  # results hy and cy of a forward operator
_WORKSPACE = 3


@dataclass(frozen=True, slots=True)
class OnednnLstm:
    """An LSTM layer that oneDNN computes, with its gradients if an operator reads its gates."""

    forward: fx.Node
    backward: fx.Node | None


class CallOnednnLstms(Pass):
    """The pass."""

    level = "host"
    acts_on = (lstm,)

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        decision = Decision(self.name, "onednn", of="LSTM layers")
        return rewrite_functions(host, apply, plan, decision)


def plan(graph: fx.Graph) -> list[OnednnLstm]:
    """The layers that oneDNN computes. Reads the graph only."""
    if not torch.backends.mkldnn.is_available():
        return []
    layers = []
    for node in graph.find_nodes(op="call_function", target=lstm):
        saved = [part for part in node.users if part.args[1] in SAVED[lstm]]
        readers = {reader for part in saved for reader in part.users}
        if not has_onednn_layer(node) or len(readers) > 1:
            continue
        (reader,) = readers or (None,)
        if reader is None or reader.target is lstm_backward:
            layers.append(OnednnLstm(node, reader))
    return layers


def apply(graph: fx.Graph) -> None:
    """Replace the layers of a graph."""
    for layer in plan(graph):
        _replace(graph, layer)
    graph.lint()


def _replace(graph: fx.Graph, layer: OnednnLstm) -> None:
    old, backward = layer.forward, layer.backward
    *arguments, _, _, reverse, _ = old.args
    nbytes = 0
    if backward is not None:
        x, h, *_ = (a.meta["val"] for a in arguments if isinstance(a, fx.Node))
        with outside_modes():
            nbytes = workspace_nbytes(*map(int, x.shape), int(h.shape[1]))
    with graph.inserting_before(old):
        new = call(graph, onednn_lstm, *arguments, reverse, nbytes, origin=old)
    with graph.inserting_after(new):
        parts = [call(graph, getitem, new, index, origin=old) for index in (*_STATES, _WORKSPACE)]
    if backward is not None:
        gradients, own, out = backward.args[:3], backward.args[3:8], backward.args[10]
        with graph.inserting_before(backward):
            operands = (*own, *arguments[5:], reverse, out, *parts, *gradients)
            twin = call(graph, onednn_lstm_backward, *operands, origin=backward)
        _move_parts(backward, twin)
    _move_parts(old, new)
    for part in parts:
        if not part.users:
            graph.erase_node(part)


def _move_parts(old: fx.Node, new: fx.Node) -> None:
    """Replace the results of `old` by those of `new`; erase unread ones."""
    for part in list(old.users):
        if part.users:
            part.replace_input_with(old, new)
        else:
            old.graph.erase_node(part)
    old.graph.erase_node(old)

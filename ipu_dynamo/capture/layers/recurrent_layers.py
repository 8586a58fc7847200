"""Call recurrent layers as one operator for each layer and direction, not step by step.

Call     %y, %h = torch.gru(%x, %h0, [...], num_layers=2, dropout=p, train=True, ...)
Recorded %y1, %h1, _ = ipu.gru(%x, %h0[0], ...)
         %y, %h2, _ = ipu.gru(torch.dropout(%y1, p, True), %h0[1], ...)
         %h = torch.stack([%h1, %h2])
Keeps    values, and random numbers as eager PyTorch computes and draws them; source lines.

PyTorch would take a layer apart into the operators of all its steps, and of several layers it would
forget the dropout between them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

import ipu_dynamo.ops.recurrent.pairs  # noqa: F401  registers operators
from ipu_dynamo.capture.layers.packed_sequences import PackedSequences
from ipu_dynamo.ops.aten import aten

_PADDED = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PACKED = ("data", "batch_sizes", *_PADDED[1:])
_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
LAYERS: dict[Callable[..., Any], str] = {
    function: kind
    for kind in _KINDS
    for overloads in [getattr(aten, kind)]
    for function in (getattr(torch, kind), overloads.packet, overloads.input, overloads.data)
}


class RecurrentLayers(TorchFunctionMode):
    """While entered, recurrent layers are called so, and sequences are packed as whole batches."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = PackedSequences()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = LAYERS.get(func)
        if kind is None:
            return self.packed.call(func, args, kwargs or {})
        if not _is_packed(args, kwargs or {}):
            return recurrent_layers(kind, *args, **(kwargs or {}))
        named = {**dict(zip(_PACKED, args, strict=False)), **(kwargs or {})}
        packed = self.packed.of(named.pop("data"), named.pop("batch_sizes"))
        out, *states = recurrent_layers(kind, packed.padded, lengths=packed.lengths, **named)
        return self.packed.like(packed, out), *states


def call_recurrent_layers(node: fx.Node) -> bool:
    """Let a node of Dynamo's graph do the same, if it is a layer on padded sequences."""
    kind = LAYERS.get(node.target)  # type: ignore[arg-type]
    if kind is None or _is_packed(node.args, node.kwargs):
        return False
    node.args = (kind, *node.args)
    node.target = recurrent_layers
    return True


def recurrent_layers(
    kind: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    *,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute `torch.<kind>` layer by layer.

    Args:
        lengths: how many steps each sequence has, `[batch]`; None: all of them.
    """
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    directions = 1 + bidirectional
    each = len(params) // (num_layers * directions)
    dtype = _dtype(kind, input, states)
    x, *states = (tensor.to(dtype) for tensor in (input, *states))
    x = x.transpose(0, 1) if batch_first else x
    ends: list[Sequence[Tensor]] = []
    for layer in range(num_layers):
        if layer and dropout and train:
            x = torch.dropout(x, dropout, True)
        outs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = [w.to(dtype) for w in params[index * each : (index + 1) * each]]
            before = [state[index] for state in states]
            out, after = _one(kind, x, before, weights, has_biases, lengths, direction == 1)
            outs.append(out)
            ends.append(after)
        x = torch.cat(outs, 2) if bidirectional else outs[0]
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.stack(states) for states in zip(*ends, strict=True)))


def _one(
    kind: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Sequence[Tensor]]:
    """One layer in one direction: its outputs, and its states after the last step."""
    wi, wh, *rest = weights
    bi, bh, *projection = rest if has_biases else (None, None, *rest)
    saves = torch.is_grad_enabled()
    if kind == "lstm":
        wp = projection[0] if projection else None
        out, *after = torch.ops.ipu.lstm(x, *states, wi, wh, bi, bh, wp, lengths, reverse, saves)[
            :3
        ]
    elif kind == "gru":
        out, *after = torch.ops.ipu.gru(x, *states, wi, wh, bi, bh, lengths, reverse, saves)[:2]
    else:
        activation = kind.removeprefix("rnn_")
        out, *after = torch.ops.ipu.rnn(x, *states, wi, wh, bi, bh, lengths, activation, reverse)
    return out, after


def _is_packed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))


def _dtype(kind: str, x: Tensor, states: Sequence[Tensor]) -> torch.dtype:
    """In which type a layer computes: that of its input, but for autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype
    if kind == "gru":  # whose state keeps its type: a sum of the old and the new one
        return states[0].dtype
    return torch.get_autocast_dtype(device)

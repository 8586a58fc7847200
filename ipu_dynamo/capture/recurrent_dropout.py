"""Drop out between recurrent layers, which PyTorch's decomposition of several layers forgets.

Before   %y, %h = torch.gru(%x, %h0, [...], num_layers=2, dropout=p, train=True, ...)
After    %y1, %h1 = torch.gru(%x, %h0[:1], [...], num_layers=1, ...)
         %y, %h2 = torch.gru(torch.dropout(%y1, p, True), %h0[1:], [...], num_layers=1, ...)
         %h = torch.cat([%h1, %h2])
Keeps    values and random numbers as eager PyTorch computes and draws them; source lines.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_PADDED = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PACKED = ("data", "batch_sizes", *_PADDED[1:])
_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_LAYERS: dict[Callable[..., Any], Callable[..., Any]] = {
    function: getattr(torch, name)
    for name in _NAMES
    for packet in [getattr(aten, name)]
    for function in (getattr(torch, name), packet, packet.input, packet.data)
}


class RecurrentDropout(TorchFunctionMode):
    """While entered, several recurrent layers with dropout are called one by one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _LAYERS and _drops_out(named := _named(args, kwargs or {})):
            return _one_by_one(_LAYERS[func], named)
        return func(*args, **(kwargs or {}))


def separate_layers(node: fx.Node) -> bool:
    """Let a node of Dynamo's graph do the same, where it has to; say whether it had."""
    if node.target not in _LAYERS or not _drops_out(_named(node.args, node.kwargs)):
        return False
    node.args = (_LAYERS[node.target].__name__, *node.args)
    node.target = recurrent_layers
    return True


def recurrent_layers(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """What `torch.<name>` computes, layer by layer."""
    return _one_by_one(getattr(torch, name), _named(args, kwargs))


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    packed = "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))
    names = _PACKED if packed else (*_PADDED, "batch_first")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _drops_out(named: Mapping[str, Any]) -> bool:
    return bool(named["train"] and named["dropout"] and named["num_layers"] > 1)


def _one_by_one(layer: Callable[..., Any], named: dict[str, Any]) -> tuple[Tensor, ...]:
    states = named["hx"] if isinstance(named["hx"], tuple | list) else (named["hx"],)
    weights, count = named["params"], named["num_layers"]
    directions, each = 1 + named["bidirectional"], len(weights) // count
    packed, batch_first = "batch_sizes" in named, named.get("batch_first", False)
    x = named["data"] if packed else named["input"]
    x = x.transpose(0, 1) if batch_first else x
    last: list[Sequence[Tensor]] = []
    for index in range(count):
        if index:
            x = torch.dropout(x, named["dropout"], True)
        rows = slice(index * directions, (index + 1) * directions)
        hidden: Any = tuple(state[rows] for state in states)
        hidden = hidden if isinstance(named["hx"], tuple | list) else hidden[0]
        own = weights[index * each : (index + 1) * each]
        inputs = (x, named["batch_sizes"], hidden, own) if packed else (x, hidden, own)
        settings = (named["has_biases"], 1, 0.0, True, named["bidirectional"])
        x, *ends = layer(*inputs, *settings, *(() if packed else (False,)))
        last.append(ends)
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.cat(ends) for ends in zip(*last, strict=True)))

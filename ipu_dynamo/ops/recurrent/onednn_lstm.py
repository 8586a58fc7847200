"""Define an LSTM layer in one direction by oneDNN, which keeps a workspace for its gradients.

Two operators that a host pass puts in the place of `ipu::lstm` and `ipu::lstm_backward`. Shapes are
theirs; float32 only, without projections, and all sequences have all steps. oneDNN reads tensors as
if they were dense. How large a workspace is depends on the processor.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.recurrent.define import define, empty_gradients

_LSTM = 2  # among oneDNN's kinds of layers
_LAYER = "Tensor x, Tensor h, Tensor c, Tensor wi, Tensor wh, Tensor? bi, Tensor? bh, bool reverse"


@cache
def workspace_nbytes(steps: int, batch: int, inputs: int, cells: int) -> int:
    """Measure the size of a layer's workspace on this machine, by running it once."""
    sizes = (steps, batch, inputs), (batch, cells), (batch, cells)
    weights = (4 * cells, inputs), (4 * cells, cells)
    tensors = [torch.zeros(size) for size in (*sizes, *weights)]
    return _run(*tensors, None, None, False, saves=True)[3].numel()


def _dense(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
) -> tuple[Tensor, ...]:
    """In oneDNN's order, with a dimension for layers in the states."""
    zeros = wi.new_zeros(wi.shape[0]) if bi is None or bh is None else None
    biases = (zeros if bias is None else bias for bias in (bi, bh))
    given = (x, wi, wh, *biases, h[None], c[None])
    return tuple(t.detach().contiguous() for t in given if t is not None)


def _run(*layer: Any, saves: bool) -> tuple[Tensor, ...]:
    *tensors, reverse = layer
    cells = tensors[4].shape[1]
    dense = _dense(*tensors)
    with torch.set_grad_enabled(saves):  # this, and not an argument, makes a workspace
        out, hy, cy, workspace = aten.mkldnn_rnn_layer(
            *dense, reverse, [], _LSTM, cells, 1, True, False, False, saves
        )
    if workspace is None or not saves:
        workspace = out.new_empty(0, dtype=torch.uint8)
    return out, hy[0], cy[0], workspace


def _forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    reverse: bool,
    nbytes: int,
) -> tuple[Tensor, ...]:
    results = _run(x, h, c, wi, wh, bi, bh, reverse, saves=nbytes > 0)
    assert results[3].numel() == nbytes, "the workspace is not as large as it was when compiling"
    return results


def _backward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    reverse: bool,
    out: Tensor,
    hy: Tensor,
    cy: Tensor,
    workspace: Tensor,
    of_out: Tensor | None,
    of_hy: Tensor | None,
    of_cy: Tensor | None,
) -> tuple[Tensor, ...]:
    results = (out.contiguous(), hy[None].contiguous(), cy[None].contiguous())
    given = (of_out, *(None if t is None else t[None] for t in (of_hy, of_cy)))
    gradients = (None if t is None else t.contiguous() for t in given)
    dense, cells = _dense(x, h, c, wi, wh, bi, bh), wh.shape[1]
    end: tuple[Any, ...] = (reverse, _LSTM, cells, 1, True, True, False, [], False, workspace)
    dx, dwi, dwh, bias, _, dh, dc = aten.mkldnn_rnn_layer_backward(
        *dense, *results, *gradients, *end
    )
    return dx, dh[0], dc[0], dwi, dwh, bias


def _shapes(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    reverse: bool,
    nbytes: int,
) -> tuple[Tensor, ...]:
    out = x.new_empty(*x.shape[:2], h.shape[1])
    workspace = x.new_empty(nbytes, dtype=torch.uint8)
    return out, x.new_empty(h.shape), x.new_empty(c.shape), workspace


def _backward_shapes(
    x: Tensor, h: Tensor, c: Tensor, wi: Tensor, wh: Tensor, *rest: object
) -> tuple[Tensor, ...]:
    return empty_gradients(x, (h, c), wi, wh)


onednn_lstm = define(
    f"onednn_lstm({_LAYER}, int nbytes) -> (Tensor out, Tensor hy, Tensor cy, Tensor workspace)",
    _forward,
    _shapes,
)
onednn_lstm_backward = define(
    f"onednn_lstm_backward({_LAYER}, Tensor out, Tensor hy, Tensor cy, Tensor workspace,"
    " Tensor? of_out, Tensor? of_hy, Tensor? of_cy)"
    " -> (Tensor x, Tensor h, Tensor c, Tensor wi, Tensor wh, Tensor bias)",
    _backward,
    _backward_shapes,
)

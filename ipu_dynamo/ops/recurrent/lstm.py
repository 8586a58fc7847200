"""Define `ipu::lstm` and its backward operator: one layer in one direction.

Shapes: `x [steps, batch, inputs]`, `h [batch, outputs]`, `c [batch, cells]`,
`wi [4 cells, inputs]`, `wh [4 cells, outputs]`, `wp [outputs, cells]` for a layer with projections.
The gates are i, f, g, o as PyTorch orders them, after their activations.

Source: PyTorch's documentation of `torch.nn.LSTM`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.recurrent.define import define, define_gradient, empty_gradients
from ipu_dynamo.ops.recurrent.steps import (
    Steps,
    check_layer,
    kept,
    memory,
    of_gates,
    of_inputs,
    product_over_steps,
    sum_over_steps,
    wide,
    widened,
    within,
)


def _lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    wp: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    saves: bool,
) -> tuple[Tensor, ...]:
    dtype, steps = x.dtype, Steps(x.shape[0], reverse, lengths)
    inside = steps.inside(x.device)
    bi, bh, wp = widened(bi, bh, wp)
    x, h, c, wi, wh = map(wide, (within(x, inside), h, c, wi, wh))
    gates, recurrent, cells = of_inputs(x, wi, bi, bh), wh.t(), c.shape[1]
    out = x.new_empty(*x.shape[:2], h.shape[1])
    states = memory(steps.count, c, saves)
    parts = [part.unbind() for part in gates.chunk(4, 2)]
    gate, both = gates.unbind(), gates[..., : 2 * cells].unbind()
    made, outs = states.unbind(), out.unbind()
    for t in steps.forward:
        i, f, g, o = (part[t] for part in parts)
        gate[t].addmm_(h, recurrent)
        both[t].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        if inside is None:
            c = torch.addcmul(f * c, i, g, out=made[t])
        else:
            c = made[t].copy_(torch.where(inside[t], torch.addcmul(f * c, i, g), c))
        if inside is None and wp is None:
            h = torch.mul(o, c.tanh(), out=outs[t])
            continue
        hidden = o * c.tanh()
        h = kept(
            hidden if wp is None else hidden @ wp.t(), h, None if inside is None else inside[t]
        )
        outs[t].copy_(h if inside is None else torch.where(inside[t], h, 0))
    saved = (gates, states) if saves else (gates[:0], states[:0])
    return tuple(r.to(dtype) for r in (out, h.clone(), c.clone(), *(s.contiguous() for s in saved)))


def _backward(
    of_out: Tensor | None,
    of_hy: Tensor | None,
    of_cy: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    wp: Tensor | None,
    lengths: Tensor | None,
    out: Tensor,
    gates: Tensor,
    cells: Tensor,
    reverse: bool,
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, ...]:
    dtype, steps = x.dtype, Steps(x.shape[0], reverse, lengths)
    inside = steps.inside(x.device)
    of_out, of_hy, of_cy, wp = widened(of_out, of_hy, of_cy, wp)
    x, h, c, wi, wh = map(wide, (within(x, inside), h, c, wi, wh))
    out, gates, cells = map(wide, (out, gates, cells))
    dh = torch.zeros_like(h) if of_hy is None else of_hy
    dc = torch.zeros_like(c) if of_cy is None else of_cy
    tanh = cells.tanh()
    i, f, g, o = gates.chunk(4, 2)
    # The factors of the gradients do not depend on other steps: compute them for all at once.
    of_cell = torch.stack(
        (g * i * (1 - i), steps.before(cells, c) * f * (1 - f), i * (1 - g * g)), 2
    )
    of_cell = of_cell if inside is None else torch.where(inside.unsqueeze(3), of_cell, 0)
    of_o, cell = (within(v, inside) for v in (tanh * o * (1 - o), o * (1 - tanh * tanh)))
    stays = f if inside is None else torch.where(inside, f, 1)
    of_outs = None if of_out is None else within(of_out, inside).unbind()
    of_gate, of_step = torch.empty_like(gates), torch.empty_like(out)
    parted = of_gate.view(*of_gate.shape[:2], 4, c.shape[1])
    first, last = parted[:, :, :3].unbind(), parted[:, :, 3].unbind()
    factors = [v.unbind() for v in (of_cell, of_o, cell, stays, of_gate)]
    for t in steps.backward:
        of_cell_t, of_o_t, cell_t, stays_t, of_gate_t = (v[t] for v in factors)
        d = dh if of_outs is None else dh + of_outs[t]
        before = d
        if wp is not None:
            of_step[t] = d
            d = d @ wp
        d_cell = torch.addcmul(dc, d, cell_t)
        torch.mul(d_cell.unsqueeze(1), of_cell_t, out=first[t])
        torch.mul(d, of_o_t, out=last[t])
        dh = kept(of_gate_t @ wh, before, None if inside is None else inside[t])
        dc = d_cell * stays_t
    dx, dwi = of_gates(of_gate, x, wi, of_x=of_x, of_weight=of_weights)
    dwh = product_over_steps(of_gate, steps.before(out, h), wanted=of_weights)
    bias = sum_over_steps(of_gate, wanted=of_weights)
    if wp is not None and of_weights:
        dwp = product_over_steps(within(of_step, inside), o * tanh)
    else:
        dwp = x.new_empty(0, c.shape[1])
    return tuple(r.to(dtype).contiguous() for r in (dx, dh, dc, dwi, dwh, bias, dwp))


def _shapes(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    wp: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    saves: bool,
) -> tuple[Tensor, ...]:
    check_layer(4, x, h, wi, wh, c.shape[-1])
    (steps, batch, _), outputs, cells = x.shape, h.shape[1], c.shape[1]
    saved = steps if saves else 0
    sizes = (
        (steps, batch, outputs),
        (batch, outputs),
        (batch, cells),
        (saved, batch, 4 * cells),
        (saved, batch, cells),
    )
    return tuple(x.new_empty(size) for size in sizes)


def _backward_shapes(
    of_out: Tensor | None,
    of_hy: Tensor | None,
    of_cy: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    wi: Tensor,
    wh: Tensor,
    wp: Tensor | None,
    lengths: Tensor | None,
    out: Tensor,
    gates: Tensor,
    cells: Tensor,
    reverse: bool,
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, ...]:
    projected = h.shape[1] if of_weights and wp is not None else 0
    gradients = empty_gradients(x, (h, c), wi, wh, of_x=of_x, of_weights=of_weights)
    return *gradients, x.new_empty(projected, c.shape[1])


def _setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    x, h, c, wi, wh, _, _, wp, lengths, ctx.reverse, _ = inputs
    out, _, _, gates, cells = output
    ctx.mark_non_differentiable(gates, cells)
    ctx.save_for_backward(x, h, c, wi, wh, wp, lengths, out, gates, cells)


def _gradients(ctx: Any, of_out: Tensor, of_hy: Tensor, of_cy: Tensor, *_: Tensor) -> Any:
    wanted = ctx.needs_input_grad
    of_weights = any(wanted[3:8])
    dx, dh, dc, dwi, dwh, bias, dwp = lstm_backward(
        of_out, of_hy, of_cy, *ctx.saved_tensors, ctx.reverse, wanted[0], of_weights
    )
    return dx, dh, dc, dwi, dwh, bias, bias, dwp


lstm = define(
    "lstm(Tensor x, Tensor h, Tensor c, Tensor wi, Tensor wh, Tensor? bi, Tensor? bh, Tensor? wp,"
    " Tensor? lengths, bool reverse, bool saves)"
    " -> (Tensor out, Tensor hy, Tensor cy, Tensor gates, Tensor cells)",
    _lstm,
    _shapes,
)
lstm_backward = define(
    "lstm_backward(Tensor? of_out, Tensor? of_hy, Tensor? of_cy, Tensor x, Tensor h, Tensor c,"
    " Tensor wi, Tensor wh, Tensor? wp, Tensor? lengths, Tensor out, Tensor gates, Tensor cells,"
    " bool reverse, bool of_x, bool of_weights)"
    " -> (Tensor x, Tensor h, Tensor c, Tensor wi, Tensor wh, Tensor bias, Tensor wp)",
    _backward,
    _backward_shapes,
)
define_gradient(lstm, _setup, _gradients)

"""Define `ipu::rnn` and its backward operator: one plain layer in one direction.

Shapes: `x [steps, batch, inputs]`, `h [batch, cells]`, `wi [cells, inputs]`, `wh [cells, cells]`;
`activation` is tanh or relu. Its result is all that the backward operator has to know of the gate.

Source: PyTorch's documentation of `torch.nn.RNN`.
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
    of_gates,
    of_inputs,
    product_over_steps,
    sum_over_steps,
    wide,
    widened,
    within,
)


def _rnn(
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    lengths: Tensor | None,
    activation: str,
    reverse: bool,
) -> tuple[Tensor, ...]:
    dtype, steps = x.dtype, Steps(x.shape[0], reverse, lengths)
    inside = steps.inside(x.device)
    bi, bh = widened(bi, bh)
    x, h, wi, wh = map(wide, (within(x, inside), h, wi, wh))
    inputs, recurrent = of_inputs(x, wi, bi, bh), wh.t()
    activate = torch.tanh_ if activation == "tanh" else torch.relu_
    out = x.new_empty(*x.shape[:2], h.shape[1])
    given, outs = inputs.unbind(), out.unbind()
    for t in steps.forward:
        new = activate(torch.addmm(given[t], h, recurrent))
        if inside is None:
            h = outs[t].copy_(new)
        else:
            h = torch.where(inside[t], new, h)
            outs[t].copy_(within(h, inside[t]))
    return out.to(dtype), h.clone().to(dtype)


def _backward(
    of_out: Tensor | None,
    of_hy: Tensor | None,
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    lengths: Tensor | None,
    out: Tensor,
    activation: str,
    reverse: bool,
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, ...]:
    dtype, steps = x.dtype, Steps(x.shape[0], reverse, lengths)
    inside = steps.inside(x.device)
    of_out, of_hy = widened(of_out, of_hy)
    x, h, wi, wh, out = map(wide, (within(x, inside), h, wi, wh, out))
    dh = torch.zeros_like(h) if of_hy is None else of_hy
    # The factors of the gradients do not depend on other steps: compute them for all at once.
    factors = (
        1 - out * out if activation == "tanh" else torch.where(out <= 0, 0.0, torch.ones_like(out))
    )
    factors = within(factors, inside)
    of_out = None if of_out is None else within(of_out, inside)
    of_gate = torch.empty_like(out)
    given = None if of_out is None else of_out.unbind()
    parts, scales = of_gate.unbind(), factors.unbind()
    for t in steps.backward:
        d = dh if given is None else dh + given[t]
        torch.mul(d, scales[t], out=parts[t])
        dh = kept(parts[t] @ wh, d, None if inside is None else inside[t])
    dx, dwi = of_gates(of_gate, x, wi, of_x=of_x, of_weight=of_weights)
    dwh = product_over_steps(of_gate, steps.before(out, h), wanted=of_weights)
    bias = sum_over_steps(of_gate, wanted=of_weights)
    return tuple(r.to(dtype).contiguous() for r in (dx, dh, dwi, dwh, bias))


def _shapes(
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    lengths: Tensor | None,
    activation: str,
    reverse: bool,
) -> tuple[Tensor, ...]:
    check_layer(1, x, h, wi, wh, h.shape[-1])
    return x.new_empty(*x.shape[:2], h.shape[1]), x.new_empty(h.shape)


def _backward_shapes(
    of_out: Tensor | None,
    of_hy: Tensor | None,
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    lengths: Tensor | None,
    out: Tensor,
    activation: str,
    reverse: bool,
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, ...]:
    return empty_gradients(x, (h,), wi, wh, of_x=of_x, of_weights=of_weights)


def _setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    x, h, wi, wh, _, _, lengths, ctx.activation, ctx.reverse = inputs
    ctx.save_for_backward(x, h, wi, wh, lengths, output[0])


def _gradients(ctx: Any, of_out: Tensor, of_hy: Tensor) -> Any:
    wanted = ctx.needs_input_grad
    dx, dh, dwi, dwh, bias = rnn_backward(
        of_out,
        of_hy,
        *ctx.saved_tensors,
        ctx.activation,
        ctx.reverse,
        wanted[0],
        any(wanted[2:6]),
    )
    return dx, dh, dwi, dwh, bias, bias


rnn = define(
    "rnn(Tensor x, Tensor h, Tensor wi, Tensor wh, Tensor? bi, Tensor? bh, Tensor? lengths,"
    " str activation, bool reverse) -> (Tensor out, Tensor hy)",
    _rnn,
    _shapes,
)
rnn_backward = define(
    "rnn_backward(Tensor? of_out, Tensor? of_hy, Tensor x, Tensor h, Tensor wi, Tensor wh,"
    " Tensor? lengths, Tensor out, str activation, bool reverse, bool of_x, bool of_weights)"
    " -> (Tensor x, Tensor h, Tensor wi, Tensor wh, Tensor bias)",
    _backward,
    _backward_shapes,
)
define_gradient(rnn, _setup, _gradients)

"""Define `ipu::gru` and its backward operator: one layer in one direction.

Shapes: `x [steps, batch, inputs]`, `h [batch, cells]`, `wi [3 cells, inputs]`,
`wh [3 cells, cells]`. Forward saves two things of each step: the gates r, z, n in PyTorch's order,
after their activations, and the state's contribution to n before r scales it.

Source: PyTorch's documentation of `torch.nn.GRU`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.recurrent.define import define, define_gradient, empty_gradients
from ipu_dynamo.ops.recurrent.steps import (
    Steps,
    check_layer,
    memory,
    of_gates,
    of_inputs,
    product_over_steps,
    sum_over_steps,
    wide,
    widened,
    within,
)


def _gru(
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    saves: bool,
) -> tuple[Tensor, ...]:
    dtype, steps = x.dtype, Steps(x.shape[0], reverse, lengths)
    inside = steps.inside(x.device)
    bi, bh = widened(bi, bh)
    x, h, wi, wh = map(wide, (within(x, inside), h, wi, wh))
    inputs, recurrent, cells = of_inputs(x, wi, bi), wh.t(), h.shape[1]
    out = x.new_empty(*x.shape[:2], cells)
    gates = memory(steps.count, x.new_empty(x.shape[1], 4 * cells), saves)
    rz, (r, z, n, hn) = gates[..., : 2 * cells].unbind(), (p.unbind() for p in gates.chunk(4, 2))
    for_rz, for_n = (v.unbind() for v in (inputs[..., : 2 * cells], inputs[..., 2 * cells :]))
    outs = out.unbind()
    for t in steps.forward:
        of_state = h @ recurrent if bh is None else torch.addmm(bh, h, recurrent)
        torch.add(for_rz[t], of_state[:, : 2 * cells], out=rz[t]).sigmoid_()
        hn[t].copy_(of_state[:, 2 * cells :])
        torch.addcmul(for_n[t], r[t], hn[t], out=n[t]).tanh_()
        if inside is None:
            h = torch.addcmul(n[t], h - n[t], z[t], out=outs[t])
        else:
            h = torch.where(inside[t], torch.addcmul(n[t], h - n[t], z[t]), h)
            outs[t].copy_(within(h, inside[t]))
    return (
        out.to(dtype),
        h.clone().to(dtype),
        (gates if saves else gates[:0]).contiguous().to(dtype),
    )


def _backward(
    of_out: Tensor | None,
    of_hy: Tensor | None,
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    lengths: Tensor | None,
    out: Tensor,
    gates: Tensor,
    reverse: bool,
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, ...]:
    dtype, steps = x.dtype, Steps(x.shape[0], reverse, lengths)
    inside = steps.inside(x.device)
    of_out, of_hy = widened(of_out, of_hy)
    x, h, wi, wh, out, gates = map(wide, (within(x, inside), h, wi, wh, out, gates))
    dh = torch.zeros_like(h) if of_hy is None else of_hy
    earlier = steps.before(out, h)
    r, z, n, hn = gates.chunk(4, 2)
    # The factors of the gradients do not depend on other steps: compute them for all at once.
    of_n = (1 - z) * (1 - n * n)
    of_r, of_z = of_n * hn * r * (1 - r), (earlier - n) * z * (1 - z)
    factors = torch.stack((of_r, of_z, of_n * r), 2)
    factors = factors if inside is None else torch.where(inside.unsqueeze(3), factors, 0)
    stays = z if inside is None else torch.where(inside, z, 1)
    of_out = None if of_out is None else within(of_out, inside)
    total, of_state = torch.empty_like(out), torch.empty_like(gates[..., : wi.shape[0]])
    of_state = of_state.contiguous()
    parted = of_state.view(*factors.shape).unbind()
    given = None if of_out is None else of_out.unbind()
    lists = [v.unbind() for v in (total, of_state, factors, stays)]
    for t in steps.backward:
        d, of_state_t, factors_t, stays_t = (v[t] for v in lists)
        d.copy_(dh) if given is None else torch.add(dh, given[t], out=d)
        torch.mul(d.unsqueeze(1), factors_t, out=parted[t])
        dh = torch.addmm(d * stays_t, of_state_t, wh)
    of_gate = torch.cat((of_state[..., : 2 * h.shape[1]], within(total * of_n, inside)), 2)
    dx, dwi = of_gates(of_gate, x, wi, of_x=of_x, of_weight=of_weights)
    dwh = product_over_steps(of_state, earlier, wanted=of_weights)
    dbi, dbh = (sum_over_steps(g, wanted=of_weights) for g in (of_gate, of_state))
    return tuple(r.to(dtype).contiguous() for r in (dx, dh, dwi, dwh, dbi, dbh))


def _shapes(
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    bi: Tensor | None,
    bh: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    saves: bool,
) -> tuple[Tensor, ...]:
    check_layer(3, x, h, wi, wh, h.shape[-1])
    (steps, batch, _), cells = x.shape, h.shape[1]
    saved = steps if saves else 0
    sizes = (steps, batch, cells), (batch, cells), (saved, batch, 4 * cells)
    return tuple(x.new_empty(size) for size in sizes)


def _backward_shapes(
    of_out: Tensor | None,
    of_hy: Tensor | None,
    x: Tensor,
    h: Tensor,
    wi: Tensor,
    wh: Tensor,
    lengths: Tensor | None,
    out: Tensor,
    gates: Tensor,
    reverse: bool,
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, ...]:
    gradients = empty_gradients(x, (h,), wi, wh, of_x=of_x, of_weights=of_weights)
    return *gradients, torch.empty_like(gradients[-1])


def _setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    x, h, wi, wh, _, _, lengths, ctx.reverse, _ = inputs
    out, _, gates = output
    ctx.mark_non_differentiable(gates)
    ctx.save_for_backward(x, h, wi, wh, lengths, out, gates)


def _gradients(ctx: Any, of_out: Tensor, of_hy: Tensor, *_: Tensor) -> Any:
    wanted = ctx.needs_input_grad
    return gru_backward(of_out, of_hy, *ctx.saved_tensors, ctx.reverse, wanted[0], any(wanted[2:6]))


gru = define(
    "gru(Tensor x, Tensor h, Tensor wi, Tensor wh, Tensor? bi, Tensor? bh, Tensor? lengths,"
    " bool reverse, bool saves) -> (Tensor out, Tensor hy, Tensor gates)",
    _gru,
    _shapes,
)
gru_backward = define(
    "gru_backward(Tensor? of_out, Tensor? of_hy, Tensor x, Tensor h, Tensor wi, Tensor wh,"
    " Tensor? lengths, Tensor out, Tensor gates, bool reverse, bool of_x, bool of_weights)"
    " -> (Tensor x, Tensor h, Tensor wi, Tensor wh, Tensor bi, Tensor bh)",
    _backward,
    _backward_shapes,
)
define_gradient(gru, _setup, _gradients)

"""Walk the steps of a recurrent layer, and define helpers that all its kinds share.

Sequences may have lengths of their own: after the end of a sequence its state stays, and its output
is 0. So the final state of the walk is each sequence's state after its own last step, and a
reversed walk begins each sequence at its own end.

Halves are computed in float32; the results of an operator are rounded once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one layer in one direction.

    Args:
        count: how many there are.
        reverse: the last one comes first.
        lengths: how many steps each sequence has, `[batch]`; None: all of them.
    """

    count: int
    reverse: bool
    lengths: Tensor | None

    @property
    def forward(self) -> range:
        """The steps in the order of the layer."""
        return range(self.count)[:: -1 if self.reverse else 1]

    @property
    def backward(self) -> range:
        """The steps in the order of its gradients."""
        return range(self.count)[:: 1 if self.reverse else -1]

    def inside(self, device: torch.device) -> Tensor | None:
        """Which sequences have which step, `[steps, batch, 1]`; None: all have all."""
        if self.lengths is None:
            return None
        steps = torch.arange(self.count, device=device)[:, None]
        return (steps < self.lengths.to(device)[None]).unsqueeze(2)

    def before(self, results: Tensor, initial: Tensor) -> Tensor:
        """The state before each step, `[steps, batch, size]`, of the `results` after each."""
        if not self.reverse:
            return torch.cat((initial[None], results[:-1]))
        states = torch.cat((results[1:], initial[None]))
        if self.lengths is None:
            return states
        steps = torch.arange(self.count, device=results.device)[:, None]
        first = steps == self.lengths.to(results.device)[None] - 1
        return torch.where(first.unsqueeze(2), initial, states)


def widened(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    """Halves as float32, everything else as it is."""
    for tensor in tensors:
        half = tensor is not None and tensor.dtype in HALF
        yield tensor.float() if half and tensor is not None else tensor


def wide(tensor: Tensor) -> Tensor:
    """The same of one."""
    return tensor.float() if tensor.dtype in HALF else tensor


def kept(new: Tensor, old: Tensor, inside: Tensor | None) -> Tensor:
    """`new` where a sequence goes on, `old` where it does not."""
    return new if inside is None else torch.where(inside, new, old)


def within(values: Tensor, inside: Tensor | None) -> Tensor:
    """`values` at the steps that sequences have, 0 at others, even in place of NaN."""
    return values if inside is None else torch.where(inside, values, 0)


def memory(steps: int, like: Tensor, saves: bool) -> Tensor:
    """For a value `like` this at each step, `[steps, ...]`: the same memory, if it is not saved."""
    values = like.new_empty(steps if saves else 1, *like.shape)
    return values.expand(steps, *like.shape)


def of_inputs(x: Tensor, weight: Tensor, *biases: Tensor | None) -> Tensor:
    """The contribution of all inputs to the gates, in one product: `[steps, batch, gates]`."""
    rows = x.reshape(-1, x.shape[2])
    some = [bias for bias in biases if bias is not None]
    result = torch.addmm(sum(some[1:], some[0]), rows, weight.t()) if some else rows @ weight.t()
    return result.view(*x.shape[:2], weight.shape[0])


def of_gates(
    gradients: Tensor, x: Tensor, weight: Tensor, *, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """From the gradients of `of_inputs` those of `x` and of the weight; without elements where
    they are not wanted."""
    rows = gradients.reshape(-1, gradients.shape[2])
    if of_x:
        dx = (rows @ weight).view(x.shape)
    else:
        dx = x.new_empty(0, *x.shape[1:])
    return dx, product_over_steps(gradients, x, wanted=of_weight)


def product_over_steps(gradients: Tensor, values: Tensor, *, wanted: bool = True) -> Tensor:
    """The gradient of a weight, `[gates, size]`, which every step has read."""
    if not wanted:
        return values.new_empty(0, values.shape[2])
    rows = gradients.reshape(-1, gradients.shape[2])
    return rows.t() @ values.reshape(-1, values.shape[2])


def sum_over_steps(gradients: Tensor, *, wanted: bool) -> Tensor:
    """The gradient of a bias."""
    return gradients.sum((0, 1)) if wanted else gradients.new_empty(0)


def check_layer(gates: int, x: Tensor, h: Tensor, wi: Tensor, wh: Tensor, size: int) -> None:
    """Raise for tensors that do not fit one layer of `size` cells with so many gates.

    Raises:
        RuntimeError: as PyTorch raises for its own layers.
    """
    rows = gates * size
    expected = (rows, x.shape[-1]), (rows, h.shape[-1])
    if x.dim() != 3 or h.dim() != 2 or (tuple(wi.shape), tuple(wh.shape)) != expected:
        raise RuntimeError(
            f"weights {list(wi.shape)} and {list(wh.shape)} of a recurrent layer do not fit its "
            f"input {list(x.shape)} and state {list(h.shape)}"
        )
    if h.shape[0] != x.shape[1]:
        raise RuntimeError(f"a state of {h.shape[0]} sequences meets an input of {x.shape[1]}")
    if x.shape[0] == 0:
        raise RuntimeError("a recurrent layer needs at least one step")
    if {t.dtype for t in (h, wi, wh)} != {x.dtype}:
        raise RuntimeError(
            f"a recurrent layer with an input of {x.dtype}, a state of {h.dtype} and weights of "
            f"{wi.dtype}: all have to have one dtype"
        )

"""Define the operator that rounds numbers to half precision up or down at random, without bias.

The random bits of an element mix its index with two words of a key.

Source: PopTorch user guide, "poptorch.options._PrecisionOptions.enableStochasticRounding".
"""

import torch
from torch import Tensor

from ipu_dynamo.ops.key_mixing import mix_bits
from ipu_dynamo.ops.precision.half_precision import DROPPED_BITS, SMALLEST_NORMAL, STEP

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("round_stochastically(Tensor x, Tensor first, Tensor second) -> Tensor")


def round_stochastically(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The half next to each element of `x`, above or below, the nearer one more probably.

    Args:
        x: f32[...] or f64[...].
        first, second: i32[], the words of the key.

    Returns:
        f16[...]
    """
    if x.dtype != torch.float32:
        x = x.to(torch.float32)
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    for word in (first, second):
        bits = mix_bits(bits + word)
    bits = bits & ((1 << DROPPED_BITS) - 1)
    # large numbers: carry the random bits into the fraction, then cut it
    dense = x if x.is_contiguous() else x.clone()
    large = ((dense.view(torch.int32) + bits) & -(1 << DROPPED_BITS)).view(torch.float32)
    # small numbers: a multiple of the step, the next one with the probability of the rest
    chance = bits.to(torch.float32) * 2.0**-DROPPED_BITS
    small = (x * (1 / STEP) + chance).floor() * STEP
    size = x.abs()
    chosen = torch.where(size < SMALLEST_NORMAL, small, large)
    return torch.where(size < float("inf"), chosen, x).to(torch.float16)


def _fake(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    plain = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    return plain if plain.stride() == x.stride() else round_stochastically(x, first, second)


_library.impl("round_stochastically", round_stochastically, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::round_stochastically", _fake, lib=_library)
round_stochastically_op = torch.ops.ipu.round_stochastically.default

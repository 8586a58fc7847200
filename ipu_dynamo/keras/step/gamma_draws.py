"""Make numbers of gamma distributions from a fixed count of uniform ones.

A loop that rejects candidates makes a varying number of draws. Here all candidates are drawn at
once, and the first accepted one counts. Each is accepted with a probability of at least 0.95. So
all are rejected once in 10**20 draws, and then the last one counts.

Source: Marsaglia and Tsang, "A simple method for generating gamma variables", 2000.
"""

import torch
from torch import Tensor

CANDIDATES = 16
UNIFORMS = 2 * CANDIDATES + 1  # for one number
_LEAST = 2.0**-25  # uniform numbers have 24 bits; their logarithm is finite


def gamma_numbers(uniforms: Tensor, alpha: Tensor) -> Tensor:
    """Numbers of the gamma distributions of shape `alpha` and scale 1.

    Args:
        uniforms: `[UNIFORMS, ...]`, of [0, 1).
        alpha: `[...]`, positive.
    """
    uniforms = uniforms.clamp(min=_LEAST)
    normal = torch.special.ndtri(uniforms[:CANDIDATES])
    limits, power = uniforms[CANDIDATES:-1].log(), uniforms[-1]
    below_one = alpha < 1
    shape = torch.where(below_one, alpha + 1, alpha)
    d = shape - 1 / 3
    v = (1 + normal / (3 * d.sqrt())) ** 3
    positive = v > 0
    log_v = torch.where(positive, v, torch.ones_like(v)).log()
    accepted = positive & (limits < 0.5 * normal * normal + d * (1 - v + log_v))
    first = accepted.int().argmax(0, keepdim=True)
    first = torch.where(accepted.any(0, keepdim=True), first, CANDIDATES - 1)
    made = d * v.gather(0, first)[0].clamp(min=0)
    return torch.where(below_one, made * power ** (1 / alpha), made)

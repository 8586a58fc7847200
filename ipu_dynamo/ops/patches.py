"""Lay out images for convolutions that matrix products compute."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The elements under the kernel at each place, f32[c * kh * kw, n * rows * columns].

    If `x` is not in memory, compiled code computes each of its elements again for every place.
    """
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    return seen.permute(1, 4, 5, 0, 2, 3).contiguous().view(x.shape[1] * kernel[0] * kernel[1], -1)


def by_channel(images: Tensor) -> Tensor:
    """f32[n, c, h, w] as f32[c, n * h * w]."""
    return images.transpose(0, 1).contiguous().view(images.shape[1], -1)

"""Measure once per machine how long convolutions take, and keep the answer.

As with matmuls, the figures decide which code a stage runs.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.patches import by_channel, patches
from ipu_dynamo.tune.autotune_cache import kept_figures
from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.microbenchmark import one_thread, shortest_times

log = logging.getLogger(__name__)
_SECONDS = 0.03  # for each convolution
# What compiled copies, fused with others, need of the time of PyTorch's; 0.35 was measured.
_COMPILED = 0.4


def convolution_times(shape: ConvolutionShape) -> Mapping[str, float] | None:
    """Seconds of a convolution in each way; None where no folder keeps them."""
    key = repr(shape)
    kept = kept_figures("convolutions", key, [key], lambda: {key: measure(shape)})
    return kept[key] if kept else None


@one_thread()
def measure(shape: ConvolutionShape) -> dict[str, float]:
    """Seconds by the library that PyTorch calls, and by matmuls.

    The second is estimated, as compiling takes longer than all that it could save: from its
    matmuls, and from PyTorch's own copies to and from patches.
    """
    kernel, where = shape.weight[2:], (shape.stride, shape.padding)
    x = torch.ones(shape.x, dtype=torch.float32, device="cpu")
    weight = torch.ones(shape.weight, dtype=torch.float32, device="cpu")
    bias = weight[:, 0, 0, 0] if shape.bias else None
    rest: list[Any] = [*map(list, where), [1, 1], False, [0, 0], 1]
    y = aten.convolution(x, weight, bias, *rest)
    flat, seen, gradients = weight.flatten(1), patches(x, kernel, *where), by_channel(y)
    back = (*rest, list(shape.mask))
    ways = {
        "torch": lambda: aten.convolution(x, weight, bias, *rest),
        "matmuls": lambda: flat @ seen,
        "patches": lambda: patches(x, kernel, *where),
        "channels": lambda: by_channel(y),
    }
    if shape.mask:
        parts = (
            (flat.t() @ gradients).view(-1, len(x), gradients.shape[1] // len(x)).transpose(0, 1)
        )
        parts = parts.contiguous()
        of_x, of_weight, _ = shape.mask
        ways["torch"] = lambda: aten.convolution_backward(y, x, weight, [len(weight)], *back)
        ways["matmuls"] = lambda: (
            of_x and flat.t() @ gradients,
            of_weight and gradients @ seen.t(),
        )
        ways["patches"] = lambda: of_weight and patches(x, kernel, *where)
        ways["sums"] = lambda: of_x and F.fold(parts, shape.x[2:], kernel, padding=shape.padding)
    times = shortest_times(ways, _SECONDS)
    log.info("%s measured: %s", shape, times)
    moved = sum(seconds for way, seconds in times.items() if way not in ("torch", "matmuls"))
    return {"torch": times["torch"], "matmuls": times["matmuls"] + _COMPILED * moved}

"""Measure once per machine how long convolutions take, and keep the answer.

As with matmuls, the figures decide which code a stage runs.
"""

import logging
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ipu_dynamo.ops.patches import by_channel, patches
from ipu_dynamo.tune.artifact_store import open_store
from ipu_dynamo.tune.autotune_cache import kept_figures
from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.machine_name import machine_name
from ipu_dynamo.tune.microbenchmark import fastest, one_thread

log = logging.getLogger(__name__)
aten = torch.ops.aten
_SECONDS = 0.03  # for each convolution
# What compiled copies, fused with others, need of the time of PyTorch's; 0.35 was measured.
_COMPILED = 0.4


def convolution_times(one: ConvolutionShape) -> Mapping[str, float] | None:
    """Seconds of a convolution in each way; None where no folder keeps them."""
    store = open_store()
    return _times_in(store.folder, machine_name(), one) if store else None


def forget() -> None:
    """Read the files again when they are needed next."""
    _times_in.cache_clear()


@cache
def _times_in(folder: Path, machine: str, one: ConvolutionShape) -> Mapping[str, float] | None:
    name = sha256(f"{machine}\n{one!r}".encode()).hexdigest()[:32]
    path, key = folder / "convolutions" / f"{name}.json", repr(one)
    kept = kept_figures(path, machine, [key], lambda: {key: measure(one)})
    return kept[key] if kept else None


@one_thread()
def measure(one: ConvolutionShape) -> dict[str, float]:
    """Seconds by the library that PyTorch calls, and by matmuls.

    The second is estimated, as compiling takes longer than all that it could save: from its
    matmuls, and from PyTorch's own copies to and from patches.
    """
    kernel, where = one.weight[2:], (one.stride, one.padding)
    x = torch.ones(one.x, dtype=torch.float32, device="cpu")
    weight = torch.ones(one.weight, dtype=torch.float32, device="cpu")
    bias = weight[:, 0, 0, 0] if one.bias else None
    rest: list[Any] = [*map(list, where), [1, 1], False, [0, 0], 1]
    y = aten.convolution(x, weight, bias, *rest)
    flat, seen, made = weight.flatten(1), patches(x, kernel, *where), by_channel(y)
    back = (*rest, list(one.mask))
    ways = {
        "torch": lambda: aten.convolution(x, weight, bias, *rest),
        "matmuls": lambda: flat @ seen,
        "patches": lambda: patches(x, kernel, *where),
        "channels": lambda: by_channel(y),
    }
    if one.mask:
        parts = (flat.t() @ made).view(-1, len(x), made.shape[1] // len(x)).transpose(0, 1)
        parts = parts.contiguous()
        of_x, of_weight, _ = one.mask
        ways["torch"] = lambda: aten.convolution_backward(y, x, weight, [len(weight)], *back)
        ways["matmuls"] = lambda: (of_x and flat.t() @ made, of_weight and made @ seen.t())
        ways["patches"] = lambda: of_weight and patches(x, kernel, *where)
        ways["sums"] = lambda: of_x and F.fold(parts, one.x[2:], kernel, padding=one.padding)
    found = fastest(ways, _SECONDS)
    log.info("%s measured: %s", one, found)
    moved = sum(seconds for way, seconds in found.items() if way not in ("torch", "matmuls"))
    return {"torch": found["torch"], "matmuls": found["matmuls"] + _COMPILED * moved}

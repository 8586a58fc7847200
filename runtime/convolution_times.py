"""Measure once per machine how long each library takes for a convolution, and keep the answer.

As with products, the figures decide which library a stage calls.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from ipu_dynamo.runtime.fastest import fastest
from ipu_dynamo.runtime.kept_figures import kept_figures
from ipu_dynamo.runtime.machine_name import machine_name
from ipu_dynamo.runtime.native_convolution import native_convolution, native_convolution_backward
from ipu_dynamo.runtime.stage_store import open_store

log = logging.getLogger(__name__)
aten = torch.ops.aten
Way = Literal["torch", "native"]
_SECONDS = 0.02  # for each convolution


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A convolution of contiguous float32 on the CPU, in one direction.

    Args:
        x, weight: sizes `[n, c, h, w]` and `[o, c, kh, kw]`.
        mask: which gradients a backward pass computes: of input, weight, bias; a forward pass has
            none of them.
        bias: whether a forward pass adds one.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    mask: tuple[bool, ...] = ()
    bias: bool = False

    def __str__(self) -> str:
        direction = "backward" if self.mask else "forward"
        x, weight = (" x ".join(map(str, size)) for size in (self.x, self.weight))
        return f"{direction} of {x} with {weight}"


def convolution_times(one: ConvolutionShape) -> Mapping[str, float] | None:
    """Seconds of a convolution by each library; None where no folder keeps them."""
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


def measure(one: ConvolutionShape) -> dict[str, float]:
    """Time a convolution by each library."""
    found = fastest(_ways(one), _SECONDS)
    log.info("%s measured: %s", one, found)
    return {str(way): seconds for way, seconds in found.items()}


def _ways(one: ConvolutionShape) -> Mapping[Way, Callable[[], object]]:
    sizes = (one.x, one.weight, one.weight[:1])
    x, weight, bias = (torch.ones(size, dtype=torch.float32, device="cpu") for size in sizes)
    where: list[Any] = [list(one.stride), list(one.padding)]
    rest = [[1, 1], False, [0, 0], 1]
    if not one.mask:
        given = bias if one.bias else None
        return {
            "torch": lambda: aten.convolution(x, weight, given, *where, *rest),
            "native": lambda: native_convolution(x, weight, given, *where),
        }
    grad = torch.ones_like(native_convolution(x, weight, None, *where))
    outputs, mask = [one.weight[0]], list(one.mask)
    return {
        "torch": lambda: aten.convolution_backward(grad, x, weight, outputs, *where, *rest, mask),
        "native": lambda: native_convolution_backward(grad, x, weight, *where, mask),
    }

"""Describe one IPU: its tiles, their memory and exchange, and the rates of its products.

A number that is no `Figure` was given by a user, and counts as a guess.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from ipu_dynamo.machine.figure import Figure

_OLD_POPLIBS = "graphcore/poplibs, early network options"
_JIA = "arXiv 1912.03413"
_DOCS = "docs.graphcore.ai"
_FIT = "calibration"
_KIB = 1024
COPY_BYTES = Figure(8, "B/cycle/tile", "F", "64-bit loads and stores, graphcore/poplibs")


@dataclass(frozen=True, slots=True)
class ProductKind:
    """How the units for products work on numbers of one type.

    Args:
        name: `16.16` and `16.32` are halves with partial sums in half and in float; `32`, `8`.
        units: convolution units that a tile has for it.
        inputs: channels that are rounded up to a multiple of this on the way in.
        outputs: the same on the way out.
        field_cycles: for each element of the field and group of input channels.
        unit_weights: how many a unit holds.
        element_bytes, partial_bytes: of an input, and of a partial sum.
        macs: multiplications of a tile in a cycle, at best.
    """

    name: str
    units: int
    inputs: int
    outputs: int
    field_cycles: int
    unit_weights: int
    element_bytes: int
    partial_bytes: int
    macs: Figure


@dataclass(frozen=True, slots=True)
class Ipu:
    """One processor.

    Args:
        tiles: how many; each has memory of its own.
        tile_bytes: memory of a tile; `reserved_bytes` of it hold no program.
        clock: of the tiles.
        workers: threads of a tile, which take turns.
        memory_bytes: read and written in a cycle by one tile.
        load_bytes: weights that the units for products load in a cycle.
        exchange_bytes: received in a cycle by one tile; two neighbours that receive the same
            bytes share a bus of twice that.
        exchange_efficiency: the share of this that programs reach.
        sync: cycles of a barrier of one IPU.
        ipus_sync: the same of several IPUs.
        overhead: cycles for each operator and serial step.
        relayout_passes: copies of an operand when its layout changes.
        activation_relayout, result_relayout: parts of a rearrangement for a product by a weight.
        convolution_relayout: the same for the activation of a convolution.
        attention_relayout: for each operand of a product of two activations with a batch.
        gradient_relayout: for each operand of one without a batch.
        kinds: of products.
        half_products: `fp8` calculates products of halves in eight bits.
    """

    name: str
    tiles: Figure
    tile_bytes: Figure
    clock: Figure
    kinds: tuple[ProductKind, ...]
    memory_bytes: float = Figure(24, "B/cycle/tile", "D", "STREAM triad: two loads and a store")
    load_bytes: float = Figure(8, "B/cycle", "fitted", "64-bit coefficient loads, poplibs")
    workers: float = Figure(6, "threads", "F", _DOCS)
    reserved_bytes: float = Figure(2 * _KIB, "B", "M", "memory that Poplar keeps")
    exchange_bytes: float = Figure(4, "B/cycle/tile", "D", "8 TB/s of all tiles")
    exchange_efficiency: float = Figure(0.85, "", "fitted", _FIT)
    sync: float = Figure(150, "cycles", "fitted", _FIT)
    ipus_sync: float = Figure(600, "cycles", "F", "thorbenlouw/lbm-graphcore")
    overhead: float = Figure(1600, "cycles", "fitted", _FIT)
    relayout_passes: float = Figure(3, "passes", "fitted", _FIT)
    activation_relayout: float = Figure(1.5, "", "fitted", _FIT)
    result_relayout: float = Figure(0.5, "", "fitted", _FIT)
    convolution_relayout: float = Figure(1, "", "fitted", _FIT)
    attention_relayout: float = Figure(1.5, "", "fitted", _FIT)
    gradient_relayout: float = Figure(1, "", "fitted", _FIT)
    half_products: Literal["half", "fp8"] = "half"

    def kind(self, name: str) -> ProductKind:
        """The kind of products of a name.

        Raises:
            ValueError: this IPU cannot calculate them.
        """
        for kind in self.kinds:
            if kind.name == name:
                return kind
        known = ", ".join(kind.name for kind in self.kinds)
        raise ValueError(f"{self.name} has no products of kind {name}; it has {known}")

    def kind_of(self, dtype: torch.dtype, partials: str) -> ProductKind:
        """The kind of a product, by the machine's dtype of its inputs and of its partial sums."""
        if element_bytes(dtype) == 4:
            return self.kind("32")
        if self.half_products == "fp8":
            return self.kind("8")
        return self.kind("16.16" if partials == "half" else "16.32")

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """The numbers by name."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float):
                own = Figure(value, "", "M", "given by the user")
                yield each.name, value if isinstance(value, Figure) else own
        for kind in self.kinds:
            yield f"products {kind.name}", kind.macs


def element_bytes(dtype: torch.dtype) -> int:
    """Bytes of an element on the machine, which has int32 for int64, float32 for float64."""
    size = dtype.itemsize
    return min(size, 8 if dtype.is_complex else 4)


def _macs(rate: float, mark: Literal["F", "D"], source: str) -> Figure:
    return Figure(rate, "products/cycle/tile", mark, source)


_PEAK = "published peak, tiles and clock"
_MK2_KINDS = (
    ProductKind("16.16", 16, 16, 16, 4, 16, 2, 2, _macs(64, "D", _PEAK)),
    ProductKind("16.32", 8, 16, 8, 4, 16, 2, 4, _macs(32, "D", "8 of 16 convolution units")),
    ProductKind("32", 16, 8, 16, 8, 8, 4, 4, _macs(16, "D", _PEAK)),
)
_FP8 = ProductKind("8", 16, 32, 16, 4, 32, 1, 2, _macs(128, "D", _PEAK))
_MK1_KINDS = (
    ProductKind("16.16", 8, 16, 8, 4, 16, 2, 2, _macs(32, "D", _PEAK)),
    ProductKind("16.32", 8, 16, 8, 4, 16, 2, 4, _macs(32, "D", _PEAK)),
    ProductKind("32", 4, 8, 4, 4, 8, 4, 4, _macs(8, "D", _PEAK)),
)

MK1 = Ipu(
    name="Mk1",
    tiles=Figure(1216, "tiles", "F", _JIA),
    tile_bytes=Figure(256 * _KIB, "B", "F", _JIA),
    clock=Figure(1.6e9, "Hz", "D", "cycles and times of thorbenlouw/lbm-graphcore"),
    kinds=_MK1_KINDS,
    exchange_bytes=Figure(4, "B/cycle/tile", "F", _OLD_POPLIBS),
)
MK2 = Ipu(
    name="Mk2",
    tiles=Figure(1472, "tiles", "F", _DOCS),
    tile_bytes=Figure(624 * _KIB, "B", "F", "simehaa/IPU"),
    clock=Figure(1.325e9, "Hz", "F", "logs of MLPerf Training 1.1"),
    kinds=_MK2_KINDS,
)
BOW = replace(MK2, name="Bow", clock=Figure(1.85e9, "Hz", "F", "logs of MLPerf Training 2.0"))
C600 = replace(
    MK2,
    name="C600",
    clock=Figure(1.5e9, "Hz", "D", "280 TFLOP/s of halves, bytedance/ByteMLPerf"),
    kinds=(*_MK2_KINDS, _FP8),
)

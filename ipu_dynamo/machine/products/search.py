"""Search the fastest way to deal a product over tiles within a share of their memory.

A product has `groups` independent matrices `[field, inputs] x [inputs, outputs]`. A convolution is
one, with a kernel: its field is the elements of its result. Each dimension may be cut into parts
side by side, and the outputs into serial steps. Operands may be swapped.

A larger share is never slower: the cheapest of all serial steps counts, not the first that fits.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from typing import Any

import numpy as np

from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.ipu import COPY_BYTES, Ipu, ProductKind
from ipu_dynamo.machine.products.plan import Plan
from ipu_dynamo.machine.products.tile_cycles import TileBlock, tile_cycles

_MOST_INNER = 128
_ADDED_BYTES = Figure(8, "B/cycle", "F", "one vector of partial sums in a cycle")
_SERIAL_STEPS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product.

    Args:
        groups, field, inputs, outputs: of the matrices, see above.
        kernel, stride, dilation: of a convolution, for each dimension of its image; empty for
            matrix products.
        width: of a convolution's result.
    """

    groups: int
    field: int
    inputs: int
    outputs: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    width: int = 1

    @property
    def positions(self) -> int:
        return prod(self.kernel)

    @property
    def flops(self) -> int:
        return 2 * self.groups * self.field * self.inputs * self.outputs * self.positions

    @property
    def swapped(self) -> "Product":
        return replace(self, field=self.outputs, outputs=self.field)

    @property
    def kernel_rows(self) -> tuple[int, int]:
        """The kernel as rows of positions; (1, 1) of a matrix product."""
        return (prod(self.kernel[:-1]), self.kernel[-1]) if self.kernel else (1, 1)

    @property
    def skipped(self) -> int:
        """Elements of the image for each that a larger kernel with a stride begins at."""
        return prod(self.stride) if self.positions > 1 else 1

    def halo(self, field: Any) -> Any:
        """Elements that a tile reads for each of its own, if its `field` is a square."""
        side = np.minimum(field ** (1 / max(len(self.kernel), 1)), self.width)
        halo = np.ones_like(side)
        for size, stride, dilation in zip(self.kernel, self.stride, self.dilation, strict=True):
            halo = halo * (side * stride + dilation * (size - 1)) / (side * stride)
        return halo


@lru_cache(maxsize=16384)
def plan_product(
    product: Product, kind: ProductKind, ipu: Ipu, tiles: int, proportion: float
) -> Plan:
    """The cheapest plan whose temporary memory fits.

    If none fits, it is the one with the least temporary memory.

    Args:
        tiles: that compute.
        proportion: of a tile's memory, from 0 to 1.
    """
    sizes = [(product, False)]
    if product.positions == 1:
        sizes.append((product.swapped, True))
    limit = proportion * ipu.tile_bytes
    plans = []
    for size, swapped in sizes:
        for steps in _SERIAL_STEPS:
            if steps > 1 and steps > ceil(size.outputs / kind.outputs):
                break
            part = replace(size, outputs=ceil(size.outputs / steps))
            plans.append(_Candidates(part, kind, ipu, tiles).best(limit, steps, swapped))

    def cycles(plan: Plan) -> float:
        return total_cycles(plan, product, kind, ipu, tiles)

    fitting = [plan for plan in plans if plan.temporary <= limit]
    if fitting:
        return min(fitting, key=lambda plan: (cycles(plan), plan.temporary))
    return min(plans, key=lambda plan: (plan.temporary, cycles(plan)))


def total_cycles(plan: Plan, product: Product, kind: ProductKind, ipu: Ipu, tiles: int) -> float:
    """Cycles of all serial steps with their overhead."""
    step = plan.compute + plan.exchange + plan.reduction + plan.barriers + ipu.overhead
    slices = slice_cycles(plan, product, kind, tiles)
    return plan.steps * step + (plan.steps - 1) * ipu.sync + slices


def slice_cycles(plan: Plan, product: Product, kind: ProductKind, tiles: int) -> float:
    """Cycles of copying the slices of the operand that serial steps cut."""
    if plan.steps == 1:
        return 0.0
    cut = product.field if plan.swapped else product.outputs
    elements = product.groups * product.positions * product.inputs * cut
    return elements * kind.element_bytes / tiles / COPY_BYTES


class _Candidates:
    """All ways to cut a product into parts side by side, one for each element of an array."""

    def __init__(self, product: Product, kind: ProductKind, ipu: Ipu, tiles: int) -> None:
        self.kind = kind
        in_grains = ceil(product.inputs / kind.inputs)
        out_grains = ceil(product.outputs / kind.outputs)
        groups, inner, columns = (
            axis.ravel()
            for axis in np.meshgrid(
                _parts(product.groups, tiles),
                _parts(in_grains, min(tiles, _MOST_INNER)),
                _parts(out_grains, tiles),
                indexing="ij",
            )
        )
        left = tiles // (groups * inner * columns)
        self.groups, self.inner, self.columns, left = (
            axis[left > 0] for axis in (groups, inner, columns, left)
        )
        field = np.ceil(product.field / left)
        self.rows = np.ceil(product.field / field)
        block = TileBlock(
            np.ceil(product.groups / self.groups),
            field,
            np.ceil(in_grains / self.inner),
            np.ceil(out_grains / self.columns),
        )
        self.compute = tile_cycles(block, product.kernel_rows, kind, ipu)
        inputs, outputs = block.inputs * kind.inputs, block.outputs * kind.outputs
        cut = self.inner > 1
        activations = block.groups * field * inputs * kind.element_bytes * product.halo(field)
        weights = product.positions * block.groups * inputs * outputs * kind.element_bytes
        partials = block.groups * field * outputs * kind.partial_bytes
        self.received = (
            activations * product.skipped * (1 - 1 / self.columns),
            weights * (1 - 1 / self.rows),
            np.where(cut, partials, 0.0),
        )
        # two neighbours that receive the same share a bus
        shared = np.where(self.columns % 2 == 0, 2, 1)
        rate = ipu.exchange_bytes * ipu.exchange_efficiency
        self.exchange = (self.received[0] / shared + self.received[1] + self.received[2]) / rate
        stages = np.where(self.inner < 16, 1, np.where(self.inner < 125, 2, 3))
        adding = partials / _ADDED_BYTES * (1 + 1 / self.inner) + ipu.sync * stages
        self.reduction = np.where(cut, adding, 0.0)
        self.barriers = ipu.sync * np.where(cut, 5, 3)
        self.temporary = np.ceil(activations + weights + partials * np.where(cut, 2, 1))

    def best(self, limit: float, steps: int, swapped: bool) -> Plan:
        """The fastest that fits `limit` bytes; else the one with the least temporary memory."""
        cycles = self.compute + self.exchange + self.reduction + self.barriers
        fits = self.temporary <= limit
        if fits.any():
            place = int(np.lexsort((self.temporary, np.where(fits, cycles, np.inf)))[0])
        else:
            place = int(np.lexsort((cycles, self.temporary))[0])
        return Plan(
            kind=self.kind.name,
            groups=int(self.groups[place]),
            rows=int(self.rows[place]),
            inner=int(self.inner[place]),
            columns=int(self.columns[place]),
            steps=steps,
            swapped=swapped,
            compute=float(self.compute[place]),
            exchange=float(self.exchange[place]),
            reduction=float(self.reduction[place]),
            barriers=float(self.barriers[place]),
            temporary=int(self.temporary[place]),
            received=tuple(ceil(axis[place]) for axis in self.received),
        )


def _parts(count: int, most: int) -> Any:
    """Numbers of parts that differ in the size of the largest part, at most `most`."""
    sizes = np.ceil(count / np.arange(1, min(count, most) + 1))
    return np.unique(np.ceil(count / sizes))

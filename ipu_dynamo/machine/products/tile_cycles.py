"""Count the cycles of one tile for its block of a product, on the units for products.

A block has `bg` batches of `bm` field elements, `n_in` groups of input channels and `n_out` of
output channels. Six workers share the field elements. Arrays hold one block for each candidate.

Source: graphcore/poplibs, 2023-08, `lib/poplin/PerformanceEstimation.hpp`. The source takes the
slower of workers and supervisor; the supervisor's few cycles more are left out here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ipu_dynamo.machine.figure import Mark
from ipu_dynamo.machine.ipu import Ipu, ProductKind

Numbers = Any  # an array of numbers, or one
MARK: Mark = "F"
# cycles of a worker's loop for 1, 2, and from 3 field elements on
_LOOPS = {2: (26, 35, 31), 4: (47, 46, 46), 1: (37, 42, 49)}  # by bytes of an element
_KERNEL_LOOPS = {2: (29, 34, 34), 4: (33, 44, 45)}


@dataclass(frozen=True, slots=True)
class TileBlock:
    """The block of a tile. All are counts; arrays of several blocks are allowed."""

    groups: Numbers
    field: Numbers
    inputs: Numbers
    outputs: Numbers


def tile_cycles(block: TileBlock, kernel: tuple[int, int], kind: ProductKind, ipu: Ipu) -> Numbers:
    """Cycles of one tile.

    Args:
        kernel: height and width of a convolution's kernel, (1, 1) for a matrix product.
    """
    field = np.ceil(block.field / ipu.workers)
    load = kind.units * kind.unit_weights * kind.element_bytes / ipu.load_bytes
    if kernel != (1, 1):
        return _of_kernel(block, kernel, kind, field, load)
    loop = _loop(_LOOPS[kind.element_bytes], field, kind.field_cycles)
    if kind.element_bytes == 1:
        first = loop - 5
        later = (block.inputs - 1) * (108 + load + 6 * loop)
        return 46 + block.groups * (21 + block.outputs * (177 + load + 6 * first + later))
    half = kind.element_bytes == 2
    # the first group of inputs also zeroes the partial sums
    first = loop - 1 if half else loop + 2 + kind.field_cycles * field
    passes = -(-kind.outputs // kind.units)
    later = (block.inputs - 1) * (15 + block.outputs * (19 + passes * (6 + load + 6 * loop)))
    zeroing = 11 + block.outputs * (18 + passes * (7 + load + 6 * first))
    worklists = 6 * (7 + 3 * (block.inputs * block.groups - 1)) if half else 0
    return 50 + worklists + block.groups * (13 + later + zeroing)


def _of_kernel(
    block: TileBlock, kernel: tuple[int, int], kind: ProductKind, field: Numbers, load: float
) -> Numbers:
    """Cycles of the vertex for kernels that are larger than one position."""
    half_partials = kind.partial_bytes == 2
    loops = _KERNEL_LOOPS[4 if kind.element_bytes == 4 else 2]
    loop = (12 if half_partials else 11) + _loop(loops, field, kind.field_cycles)
    passes = -(-kind.outputs // kind.units)
    height, width = kernel
    position = 12 + passes * (load + 18 + 6 * loop)
    rows = 14 + block.outputs * (14 + height * (14 + width * position))
    results = block.outputs * kind.outputs
    zeroing = block.groups * block.field * results / (4 if half_partials else 2)
    start = 218 if half_partials else 212
    return start + block.groups * (17 + 23 * block.outputs + block.inputs * rows) + zeroing


def _loop(table: tuple[int, int, int], field: Numbers, cycles: int) -> Numbers:
    """Cycles of a worker's loop over some field elements; `cycles` for each from the third on."""
    one, two, more = table
    return np.where(field <= 1, one, np.where(field == 2, two, more + cycles * (field - 3)))

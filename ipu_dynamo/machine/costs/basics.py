"""Price the work of which operators consist: vectors, exchanges and reductions.

`E`, `X` and `R` of other files are these. A tile's six workers take turns, so one worker cycle is
six of the tile; a supervisor starts them and waits.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, sqrt

import torch

from ipu_dynamo.machine.cost import Bounds, Cost, Resources
from ipu_dynamo.machine.figure import Figure, Mark, least_certain, mark_of_number
from ipu_dynamo.machine.ipu import element_bytes
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator

_ESTIMATORS = "estimators of graphcore/poplibs popops"
WORKER_START = Figure(20, "cycles/worker", "F", _ESTIMATORS)
VERTEX_START = Figure(20, "cycles", "F", _ESTIMATORS)
REDUCTION_START = Figure(300, "cycles", "M", "two stages of vertices")


def vector_width(dtype: torch.dtype) -> int:
    """Elements of a vector: 4 halves or 2 floats. Integers count as floats, bool as half."""
    half = dtype == torch.bool or (dtype.is_floating_point and element_bytes(dtype) <= 2)
    return 4 if half else 2


def machine_bytes(*types: TensorType) -> int:
    """Bytes of tensors on the machine."""
    return sum(numel(type_) * element_bytes(type_.dtype) for type_ in types)


def numel(type_: TensorType) -> int:
    count = 1
    for size in type_.shape:
        count *= size
    return count


def elementwise(elements: int, dtype: torch.dtype, c: float, resources: Resources) -> Cost:
    """A pass over vectors of a result.

    Args:
        c: worker cycles for each vector.
    """
    return vectors(elements, dtype, c, resources) + run(resources)


def vectors(elements: int, dtype: torch.dtype, c: float, resources: Resources) -> Cost:
    """The same without the overhead of an operator."""
    workers = resources.ipu.workers
    count = ceil(elements / (workers * resources.tiles * vector_width(dtype)))
    cycles = workers * (WORKER_START + c * count) + VERTEX_START
    return Cost(compute=cycles, marks={"compute": worst(c, WORKER_START)})


def run(resources: Resources) -> Cost:
    """The overhead of every operator."""
    overhead = resources.ipu.overhead
    return Cost(overhead=float(overhead), marks={"overhead": mark_of_number(overhead)})


def exchange(nbytes: float, resources: Resources) -> Cost:
    """Tiles receive bytes that are spread over all of them."""
    ipu = resources.ipu
    rate = ipu.exchange_bytes * ipu.exchange_efficiency
    marks = [mark_of_number(ipu.exchange_bytes), mark_of_number(ipu.exchange_efficiency)]
    received = nbytes / resources.tiles
    return Cost(
        exchange=received / rate,
        overhead=float(ipu.sync),
        marks={"exchange": least_certain(marks), "overhead": mark_of_number(ipu.sync)},
        bounds=Bounds(exchange=received / (2 * ipu.exchange_bytes)),
        exchanges=(ceil(received),),
    )


def reduce(elements: int, results: int, dtype: torch.dtype, resources: Resources) -> Cost:
    """Reduce elements to results, in two stages of partial values."""
    if not elements or not results:
        return run(resources)
    workers, tiles = resources.ipu.workers, resources.tiles
    parts = sqrt(min(tiles, elements / results))
    count = ceil(elements / (workers * tiles * 2 * vector_width(dtype)))
    own = Cost(
        compute=workers * (WORKER_START + count) + REDUCTION_START,
        reduction=ceil(results / tiles) * parts / 2,
        marks={"compute": REDUCTION_START.mark, "reduction": "D"},
    )
    return own + run(resources) + exchange(4 * results * parts, resources)


def touching(nbytes: float, resources: Resources) -> Cost:
    """The bound of an operator that reads and writes bytes in the memory of tiles."""
    return Cost(bounds=Bounds(memory=nbytes / (resources.ipu.memory_bytes * resources.tiles)))


def worst(*numbers: float) -> Mark:
    """The mark of a result of numbers."""
    return least_certain(map(mark_of_number, numbers))


class PartCosts:
    """The operators that the machine runs in place of one, in order."""

    def __init__(self, operator: MachineOperator) -> None:
        self._operator = operator
        self._made: list[tuple[MachineOperator, Cost]] = []

    def add(
        self, name: str, reads: Sequence[TensorType], makes: Sequence[TensorType], cost: Cost
    ) -> None:
        """Add an operator with its types and its cost."""
        part = replace(
            self._operator, operator=name, operands=tuple(reads), results=tuple(makes), bodies=()
        )
        self._made.append((part, cost))

    def cost(self, between: int = 0, tiles: int = 1) -> Cost:
        """The cost of all.

        Args:
            between: bytes of results that only later parts read, at most at a time.
            tiles: that hold them.
        """
        whole = sum((cost for _, cost in self._made), Cost())
        temporary = whole.temporary + ceil(between / tiles)
        parts = tuple(self._made)
        return replace(whole, plan=None, exchanges=(), parts=parts, temporary=temporary)

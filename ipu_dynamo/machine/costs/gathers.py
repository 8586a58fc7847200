"""Price operators that read or update rows by index.

A table is cut by rows or by columns over the tiles, the cheaper. Every tile gets all indices. Cut
by rows it skips those of other tiles, and a second stage selects. An update sends the rows to the
tiles that hold the table, which read, add and write.

Source: estimators of graphcore/poplibs popops for multi-slice.
"""

from collections.abc import Mapping
from math import ceil, prod
from typing import Any

import torch

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.costs.arguments import Operand, arguments
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.ipu import element_bytes
from ipu_dynamo.program.machine_operators import MachineOperator

_ESTIMATORS = "estimators of graphcore/poplibs popops"
_START = Figure(30, "cycles/worker", "F", _ESTIMATORS)
_INDEX = Figure(19, "cycles/worker", "F", _ESTIMATORS)
_ELEMENTS = Figure(2, "cycles/worker", "F", _ESTIMATORS)  # for two elements of a row
_OUTSIDE = Figure(8, "cycles/worker", "F", _ESTIMATORS)
_INDEX_BYTES = 4


def gathered(count: int, row: int, dtype: torch.dtype, resources: Resources) -> Cost:
    """The cost of reading `count` rows of `row` elements."""
    return min(_ways(count, row, dtype, resources, update=False), key=lambda cost: cost.cycles)


def updated(count: int, row: int, dtype: torch.dtype, resources: Resources) -> Cost:
    """The cost of adding `count` rows to those of a table."""
    return min(_ways(count, row, dtype, resources, update=True), key=lambda cost: cost.cycles)


def _ways(
    count: int, row: int, dtype: torch.dtype, resources: Resources, update: bool
) -> tuple[Cost, Cost]:
    """The costs with a table that is cut by columns, and by rows."""
    tiles, workers = resources.tiles, resources.ipu.workers
    nbytes = count * row * element_bytes(dtype)
    common = basics.run(resources) + basics.touching(2 * nbytes, resources)
    common += basics.exchange(_INDEX_BYTES * count * tiles, resources)  # each tile gets them all

    def on_tile(inside: int, elements: int) -> Cost:
        of_rows = inside * (_INDEX + _ELEMENTS * ceil(elements / 2))
        cycles = workers * (_START + of_rows + _OUTSIDE * (count - inside))
        return Cost(compute=cycles * (2 if update else 1), marks={"compute": "F"})

    moved = basics.exchange(nbytes, resources)
    # cut by rows, any tile may hold any row of an update
    second = basics.exchange(nbytes * tiles, resources) if update else moved + moved
    by_columns = common + on_tile(count, ceil(row / tiles)) + moved
    by_rows = common + on_tile(ceil(count / tiles), row) + second
    return by_columns, by_rows


def _gather(table: str, row_of: str = "") -> Price:
    """The price of reading single elements of a table, or its rows along a dimension."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values = arguments(operator, roles)
        shape, result = values[table].shape, operator.results[0]
        row = prod(shape[_along(values, row_of, shape) + 1 :]) if row_of else 1
        count = basics.numel(result) // max(row, 1)
        return gathered(count, row, result.dtype, resources)

    return price


def _along(values: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> int:
    """The dimension along which indices select."""
    dim = 0 if name == "first" else int(values[name])
    return dim % max(len(shape), 1)


def _index(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of reading rows by several indices."""
    values, result = arguments(operator, roles), operator.results[0]
    row = _row_after(values["indices"], values["self"].shape)
    return gathered(basics.numel(result) // max(row, 1), row, result.dtype, resources)


def _row_after(indices: list[Any], shape: tuple[int, ...]) -> int:
    """Elements of the dimensions after the last indexed one."""
    last = max((i for i, index in enumerate(indices) if index is not None), default=-1)
    return prod(shape[last + 1 :])


def _update(source: str, table: str, row_of: str = "") -> Price:
    """The price of adding to single elements of a table, or to rows along a dimension."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values = arguments(operator, roles)
        shape = values[table].shape if table else operator.results[0].shape
        row = prod(shape[_along(values, row_of, shape) + 1 :]) if row_of else 1
        added: Operand | None = values[source]
        elements = basics.numel((added or values["index"]).type)
        return updated(elements // max(row, 1), row, operator.results[0].dtype, resources)

    return price


def _index_put(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of writing rows by several indices; one value may stand for all of them."""
    values, result = arguments(operator, roles), operator.results[0]
    indices, shape = values["indices"], values["self"].shape
    row = _row_after(indices, shape)
    given = [index.shape for index in indices if index is not None]
    whole = prod(size for size, index in zip(shape, indices, strict=False) if index is None)
    count = prod(torch.broadcast_shapes(*given)) * whole
    return updated(count, row, result.dtype, resources)


def _nll(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of the losses of rows by their classes, and their mean."""
    values = arguments(operator, roles)
    rows, dtype = basics.numel(values["target"].type), values["self"].type.dtype
    cost = gathered(rows, 1, dtype, resources)
    return cost + basics.reduce(rows, basics.numel(operator.results[0]), dtype, resources)


def _nll_backward(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of writing one element of each row."""
    values = arguments(operator, roles)
    rows = basics.numel(values["target"].type)
    return updated(rows, 1, values["self"].type.dtype, resources)


PRICES: Mapping[str, Price] = {  # by the name without the overload
    "aten.embedding": _gather("weight", "first"),
    "aten.index_select": _gather("self", "dim"),
    "aten.gather": _gather("self"),
    "aten.take_along_dim": _gather("self"),
    "aten.take": _gather("self"),
    "aten.index": _index,
    "aten._unsafe_index": _index,
    "aten.embedding_dense_backward": _update("grad_output", "", "first"),
    "aten.index_add": _update("source", "self", "dim"),
    "aten.index_copy": _update("source", "self", "dim"),
    "aten.index_reduce": _update("source", "self", "dim"),
    "aten.scatter.src": _update("src", "self"),
    "aten.scatter.value": _update("index", "self"),
    "aten.scatter_add": _update("src", "self"),
    "aten.scatter_reduce": _update("src", "self"),
    "aten.index_put": _index_put,
    "aten._unsafe_index_put": _index_put,
    "aten.nll_loss_forward": _nll,
    "aten.nll_loss2d_forward": _nll,
    "aten.nll_loss_backward": _nll_backward,
    "aten.nll_loss2d_backward": _nll_backward,
}

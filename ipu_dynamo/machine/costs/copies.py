"""Price copies inside one IPU: their bytes move, and tiles read and write them."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.costs.products import RELAYOUT_BYTES
from ipu_dynamo.machine.ipu import COPY_BYTES, element_bytes
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator


def copied(types: tuple[TensorType, ...], resources: Resources) -> Cost:
    """The cost of copying tensors; if their last dimension is not aligned, it is slower."""
    sizes = [basics.machine_bytes(type_) for type_ in types]
    cost = basics.run(resources) + basics.touching(2 * sum(sizes), resources)
    for type_, nbytes in zip(types, sizes, strict=True):
        row = (type_.shape[-1] if type_.shape else 1) * element_bytes(type_.dtype)
        aligned = next(each for each in RELAYOUT_BYTES if row % each == 0)
        figure = COPY_BYTES if aligned == 8 else RELAYOUT_BYTES[aligned]
        of_byte = 1 / COPY_BYTES if aligned == 8 else float(figure)
        cycles = nbytes / resources.tiles * of_byte
        cost += Cost(compute=cycles, marks={"compute": figure.mark})
    moved = basics.exchange(sum(sizes), resources)
    return cost + replace(moved, exchanges=tuple(ceil(n / resources.tiles) for n in sizes))


def _operands(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of an operator that moves its operands, each once."""
    return copied(operator.operands, resources)


def _results(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of an operator that writes its results, each once."""
    return copied(operator.results, resources)


def _last(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of a copy of the last operand into the first."""
    return copied(operator.operands[-1:], resources)


_OF_OPERANDS = (
    "cat stack constant_pad_nd slice_backward select_backward diagonal_backward unfold_backward"
)
_OF_RESULTS = (
    "repeat roll flip rot90 copy diag_embed block_diag im2col narrow_copy pixel_shuffle "
    "pixel_unshuffle channel_shuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d"
)
_PADDINGS = [f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]
PRICES: Mapping[str, Price] = {  # by the name without the overload
    **{f"aten.{name}": _operands for name in _OF_OPERANDS.split()},
    **{f"aten.{name}": _results for name in _OF_RESULTS.split()},
    **{f"aten.{name}": _results for name in _PADDINGS},
    **{f"aten.{name}_backward": _results for name in _PADDINGS},
    "aten.slice_scatter": _last,
    "aten.select_scatter": _last,
    "aten.diagonal_scatter": _last,
    "aten.as_strided_scatter": _last,
}

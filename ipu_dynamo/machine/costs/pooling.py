"""Price pooling, and sorting by a bitonic network."""

from collections.abc import Mapping
from math import ceil, log2, prod

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.costs.arguments import arguments
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator

_POSITION = Figure(2, "cycles/vector", "M", "for each position of the window")
_EXCHANGED = Figure(6, "cycles/vector", "M", "one comparison and exchange")


def _pooled(
    small: TensorType, large: TensorType, positions: float, halo: float, resources: Resources
) -> Cost:
    """The cost of pooling `large` to `small`, or of its gradient.

    Args:
        positions: of the window.
        halo: elements that windows share with others, for each element of `large`.
    """
    c = Figure(_POSITION * positions, _POSITION.unit, _POSITION.mark, _POSITION.source)
    cost = basics.elementwise(basics.numel(small), small.dtype, c, resources)
    cost += basics.exchange(halo * basics.machine_bytes(large), resources)
    return cost + basics.touching(basics.machine_bytes(small, large), resources)


def _pool(large: str, backward: bool = False) -> Price:
    """The price of pooling by a window of one size."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values = arguments(operator, roles)
        image = values[large].type
        small = values["grad_output"].type if backward else operator.results[0]
        sizes = [int(size) for size in values["kernel_size"]]
        strides = [int(size) for size in values["stride"] or sizes]
        dimensions = len(image.shape) - (2 if len(image.shape) > len(sizes) + 1 else 1)
        sizes = sizes * dimensions if len(sizes) == 1 else sizes
        strides = strides * dimensions if len(strides) == 1 else strides
        shared = [max(k - s, 0) for k, s in zip(sizes, strides, strict=True)]
        # a tile has a square of the image, as for convolutions
        side = (basics.numel(small) / resources.tiles) ** (1 / max(len(sizes), 1))
        sides = [max(min(side, small.shape[-1]) * stride, 1) for stride in strides]
        halo = prod(1 + s / length for s, length in zip(shared, sides, strict=True)) - 1
        return _pooled(small, image, prod(sizes), halo, resources)

    return price


def _adaptive(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of pooling to a given size: windows share no elements."""
    tensors = *operator.operands, *operator.results[:1]
    large, small = max(tensors, key=basics.numel), min(tensors, key=basics.numel)
    positions = basics.numel(large) / max(basics.numel(small), 1)
    return _pooled(small, large, positions, 0.0, resources)


def _sort(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of sorting rows: comparisons, and stages in which rows move."""
    values = arguments(operator, roles)
    type_ = values["self"].type
    size = type_.shape[values.get("dim", -1)] if type_.shape else 1
    stages = ceil(log2(size)) if size > 1 else 0
    comparisons = ceil(basics.numel(type_) * stages**2 / 2)
    cost = basics.elementwise(comparisons, type_.dtype, _EXCHANGED, resources)
    nbytes = basics.machine_bytes(type_)
    if stages:
        cost += basics.exchange(nbytes, resources) * stages
    return cost + basics.touching(2 * nbytes, resources)


PRICES: Mapping[str, Price] = {  # by the name without the overload
    **{f"aten.max_pool{n}d_with_indices": _pool("self") for n in (2, 3)},
    **{f"aten.max_pool{n}d_with_indices_backward": _pool("self", True) for n in (2, 3)},
    **{f"aten.avg_pool{n}d": _pool("self") for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d_backward": _pool("self", True) for n in (2, 3)},
    **{f"aten._adaptive_avg_pool{n}d": _adaptive for n in (2, 3)},
    **{f"aten._adaptive_avg_pool{n}d_backward": _adaptive for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d": _adaptive for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d_backward": _adaptive for n in (2, 3)},
    **{f"aten.{name}": _sort for name in ("sort", "topk", "kthvalue", "argsort", "msort")},
}

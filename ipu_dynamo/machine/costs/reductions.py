"""Price operators that reduce dimensions, and those that consist of such: softmax and norms.

Softmax is a maximum, a subtraction, an exponential, a sum and a product with the inverse. A norm is
a mean, a variance and a pass; its backward pass counts as one and a half of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics, elementwise
from ipu_dynamo.machine.costs.arguments import arguments
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator

_NORM_BACKWARD = Figure(1.5, "", "M", "of the forward pass")
Passes = Callable[[MachineOperator, Resources, Roles], Cost]


def softmax(values: TensorType, rows: int, resources: Resources) -> Cost:
    """The cost of softmax or its logarithm over `rows` rows."""
    elements, dtype = basics.numel(values), values.dtype
    width = basics.vector_width(dtype)
    arithmetic = elementwise.ARITHMETIC.of(width, False)
    exponential = elementwise.EXP.of(width, False)
    reduced = basics.reduce(elements, rows, dtype, resources)
    applied = basics.elementwise(elements, dtype, arithmetic, resources)
    raised = basics.elementwise(elements, dtype, exponential, resources)
    touched = basics.touching(2 * basics.machine_bytes(values), resources)
    return reduced + applied + raised + reduced + applied + touched


def softmax_backward(values: TensorType, rows: int, resources: Resources) -> Cost:
    """The cost of the gradient of softmax or its logarithm over `rows` rows."""
    elements, dtype = basics.numel(values), values.dtype
    arithmetic = elementwise.ARITHMETIC.of(basics.vector_width(dtype), False)
    applied = basics.elementwise(elements, dtype, arithmetic, resources)
    touched = basics.touching(3 * basics.machine_bytes(values), resources)
    return basics.reduce(elements, rows, dtype, resources) + applied + applied + applied + touched


def _norm(values: TensorType, statistics: int, passes: int, resources: Resources) -> Cost:
    """The cost of a norm with so many means, in `passes` reductions."""
    elements, dtype = basics.numel(values), values.dtype
    arithmetic = elementwise.ARITHMETIC.of(basics.vector_width(dtype), False)
    reduced = basics.reduce(elements, max(statistics, 1), dtype, resources)
    applied = basics.elementwise(elements, dtype, arithmetic, resources)
    return sum([reduced] * passes, applied)


def _reduction(passes: int = 1, *speeds: elementwise.Speed) -> Price:
    """The price of reductions, after passes over the elements."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        if not operator.operands or not operator.results:
            return Cost()
        values = max(operator.operands, key=basics.numel)
        elements, results = basics.numel(values), basics.numel(operator.results[0])
        reduced = basics.reduce(elements, results, values.dtype, resources)
        cost = sum([reduced] * passes, Cost())
        for speed in speeds:
            cycles = speed.of(basics.vector_width(values.dtype), False)
            cost += basics.elementwise(elements, values.dtype, cycles, resources)
        nbytes = basics.machine_bytes(*operator.operands, *operator.results)
        return cost + basics.touching(nbytes, resources)

    return price


def _over_rows(formula: Callable[[TensorType, int, Resources], Cost], dim: str) -> Price:
    """The price of softmax or its gradient over one dimension."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        along, result = arguments(operator, roles)[dim], operator.results[0]
        size = result.shape[along] if result.shape else 1
        return formula(result, basics.numel(result) // max(size, 1), resources)

    return price


def _layer_norm(passes: int, backward: bool) -> Price:
    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values = arguments(operator, roles)
        images = values["input"].type
        rows = basics.numel(images) // max(prod(values["normalized_shape"]), 1)
        return _priced(_norm(images, rows, passes, resources), operator, backward, resources)

    return price


def _group_norm(backward: bool) -> Price:
    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values = arguments(operator, roles)
        statistics = int(values["N"]) * int(values["group"])
        cost = _norm(values["input"].type, statistics, 2, resources)
        return _priced(cost, operator, backward, resources)

    return price


def _batch_norm(training: bool | str, backward: bool) -> Price:
    """The price of a batch norm; with running statistics it is a pass over the values.

    Args:
        training: or the name of the argument that says so.
    """

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values = arguments(operator, roles)
        trains = values[training] if isinstance(training, str) else training
        images = values["input"].type
        channels = images.shape[1] if len(images.shape) > 1 else 1
        cost = _norm(images, channels, 2 if trains else 0, resources)
        return _priced(cost, operator, backward, resources)

    return price


def _priced(cost: Cost, operator: MachineOperator, backward: bool, resources: Resources) -> Cost:
    """A norm, or its gradient."""
    nbytes = max(map(basics.machine_bytes, operator.operands)) * (3 if backward else 2)
    if backward:
        times = float(_NORM_BACKWARD)
        cost = replace(cost * times, marks=dict.fromkeys(cost.marks, _NORM_BACKWARD.mark))
    return cost + basics.touching(nbytes, resources)


_ARITHMETIC, _EXP, _LOG = elementwise.ARITHMETIC, elementwise.EXP, elementwise.LOG
_SUMS = (
    "sum mean amax amin max min argmax argmin prod all any nansum count_nonzero aminmax trace "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"
)
PRICES: Mapping[str, Price] = {  # by the name without the overload
    **{f"aten.{name}": _reduction() for name in _SUMS.split()},
    "aten.var": _reduction(2),
    "aten.std": _reduction(2),
    "aten.var_mean": _reduction(2),
    "aten.std_mean": _reduction(2),
    "aten.norm": _reduction(),
    "aten.linalg_vector_norm": _reduction(),
    "aten.logsumexp": _reduction(2, _EXP),
    "aten.mse_loss": _reduction(1, _ARITHMETIC, _ARITHMETIC),
    "aten.smooth_l1_loss": _reduction(1, _ARITHMETIC, elementwise.SELECT, _ARITHMETIC),
    "aten.huber_loss": _reduction(1, _ARITHMETIC, elementwise.SELECT, _ARITHMETIC),
    "aten.binary_cross_entropy": _reduction(1, _LOG, _LOG, _ARITHMETIC, _ARITHMETIC),
    "aten.binary_cross_entropy_with_logits": _reduction(1, _EXP, _LOG, _ARITHMETIC, _ARITHMETIC),
    "aten.dist": _reduction(1, _ARITHMETIC),
    "aten._softmax": _over_rows(softmax, "dim"),
    "aten._safe_softmax": _over_rows(softmax, "dim"),
    "aten._log_softmax": _over_rows(softmax, "dim"),
    "aten._softmax_backward_data": _over_rows(softmax_backward, "dim"),
    "aten._log_softmax_backward_data": _over_rows(softmax_backward, "dim"),
    "aten.native_layer_norm": _layer_norm(2, False),
    "aten.native_layer_norm_backward": _layer_norm(2, True),
    "aten._fused_rms_norm": _layer_norm(1, False),
    "aten._fused_rms_norm_backward": _layer_norm(1, True),
    "aten.native_group_norm": _group_norm(False),
    "aten.native_group_norm_backward": _group_norm(True),
    "aten.native_batch_norm": _batch_norm("training", False),
    "aten._native_batch_norm_legit": _batch_norm("training", False),
    "aten._native_batch_norm_legit_functional": _batch_norm("training", False),
    "aten._native_batch_norm_legit_no_training": _batch_norm(False, False),
    "aten._batch_norm_with_update": _batch_norm(True, False),
    "aten._batch_norm_with_update_functional": _batch_norm(True, False),
    "aten._batch_norm_no_update": _batch_norm(False, False),
    "aten.native_batch_norm_backward": _batch_norm("train", True),
    "aten.batch_norm_backward": _batch_norm("update", True),
}

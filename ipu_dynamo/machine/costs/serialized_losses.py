"""Price the cross-entropy of a serialised product: its blocks, each with passes of softmax."""

from collections.abc import Mapping
from math import ceil

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.costs.arguments import Operand, arguments
from ipu_dynamo.machine.costs.gathers import gathered
from ipu_dynamo.machine.costs.products import matmul, proportion_of
from ipu_dynamo.machine.costs.reductions import softmax
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator


def _loss(backward: bool) -> Price:
    """The price of the losses, or of the gradients, which need the logits again."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        values, parts = arguments(operator, roles), basics.PartCosts(operator)
        x, rhs, steps = values["x"], values["rhs"], int(values["factor"])
        (rows, width), classes = x.shape, rhs.shape[1]
        if values["mode"] == "input_channels":
            rows = ceil(rows / steps)
        else:
            classes = ceil(classes / steps)

        def matrix(operand: Operand, *shape: int) -> Operand:
            type_ = TensorType(operand.type.dtype, shape)
            return Operand(type_, operand.is_weight, operand.from_host)

        logits = Operand(TensorType(x.type.dtype, (rows, classes)))
        products = [(matrix(x, rows, width), matrix(rhs, width, classes))]
        if backward:
            products.append((logits, matrix(rhs, classes, width)))
            transposed = Operand(TensorType(x.type.dtype, (width, rows)))
            products.append((transposed, logits))
        proportion = proportion_of(operator, resources)
        for a, b in products:
            cost = matmul(a, b, resources, proportion, resources.partials) * steps
            result = TensorType(x.type.dtype, (a.shape[0], b.shape[1]))
            parts.add("aten.mm.default", (a.type, b.type), (result,), cost)
        cost = softmax(logits.type, rows, resources) * steps
        parts.add("aten._log_softmax.default", (logits.type,), (logits.type,), cost)
        if not backward:
            losses = TensorType(x.type.dtype, (rows,))
            cost = gathered(rows, 1, x.type.dtype, resources) * steps
            parts.add("aten.gather.default", (logits.type,), (losses,), cost)
        return parts.cost(basics.machine_bytes(logits.type), resources.tiles)

    return price


PRICES: Mapping[str, Price] = {
    "ipu.serialized_loss.default": _loss(backward=False),
    "ipu.serialized_loss_backward.default": _loss(backward=True),
}

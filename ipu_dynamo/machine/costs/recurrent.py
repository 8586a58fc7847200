"""Price recurrent layers: one product for all inputs, then for each step the product of the state
and the passes of the gates.

The backward pass has the passes and the product of the state for each step. Products over all steps
then give the gradients of inputs and weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics, elementwise
from ipu_dynamo.machine.costs.arguments import Operand, arguments
from ipu_dynamo.machine.costs.elementwise import ARITHMETIC, SIGMOID, TANH, Speed
from ipu_dynamo.machine.costs.products import matmul, proportion_of
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineOperator

# passes of one step over the cells, forward and backward
_CURVE_BACKWARD = elementwise.SPEEDS["sigmoid_backward"]
_LSTM = (SIGMOID, SIGMOID, TANH, SIGMOID, ARITHMETIC, ARITHMETIC, ARITHMETIC, TANH, ARITHMETIC)
_GRU = (SIGMOID, SIGMOID, ARITHMETIC, ARITHMETIC, TANH, ARITHMETIC, ARITHMETIC, ARITHMETIC)
_RNN = (TANH,)
_LSTM_BACKWARD = (_CURVE_BACKWARD,) * 5 + (ARITHMETIC,) * 6
_GRU_BACKWARD = (_CURVE_BACKWARD,) * 3 + (ARITHMETIC,) * 6
_RNN_BACKWARD = (_CURVE_BACKWARD, ARITHMETIC)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The sizes and operands of a layer."""

    steps: int
    batch: int
    inputs: int
    outputs: int
    gates: int
    x: Operand
    wi: Operand
    wh: Operand

    @classmethod
    def of(cls, operator: MachineOperator, roles: Roles) -> "_Layer":
        values = arguments(operator, roles)
        x, wi, wh = values["x"], values["wi"], values["wh"]
        steps, batch, inputs = x.shape
        return cls(steps, batch, inputs, wh.shape[1], wh.shape[0], x, wi, wh)

    def value(self, *shape: int) -> Operand:
        """An activation of the layer."""
        return Operand(TensorType(self.x.type.dtype, shape))


def _as(operand: Operand, *shape: int) -> Operand:
    type_ = TensorType(operand.type.dtype, shape)
    return Operand(type_, operand.is_weight, operand.from_host)


def _gates(layer: _Layer, speeds: tuple[Speed, ...], cells: int, resources: Resources) -> Cost:
    """The passes of one step, each over one number for each cell."""
    type_ = layer.value(layer.batch, cells).type
    elements, width = basics.numel(type_), basics.vector_width(type_.dtype)
    cost = basics.touching(2 * len(speeds) * basics.machine_bytes(type_), resources)
    for speed in speeds:
        cycles = speed.of(width, False)
        cost += basics.elementwise(elements, type_.dtype, cycles, resources)
    return cost


def _forward(speeds: tuple[Speed, ...], gates: int) -> Price:
    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        layer, parts = _Layer.of(operator, roles), basics.PartCosts(operator)
        proportion, cells = proportion_of(operator, resources), layer.gates // gates
        rows = layer.steps * layer.batch
        state = layer.value(layer.batch, layer.outputs)
        of_inputs = _as(layer.x, rows, layer.inputs), _as(layer.wi, layer.inputs, layer.gates)
        of_state = state, _as(layer.wh, layer.outputs, layer.gates)
        gate = layer.value(layer.batch, layer.gates).type
        for (a, b), times in ((of_inputs, 1), (of_state, layer.steps)):
            cost = matmul(a, b, resources, proportion, resources.partials) * times
            parts.add("aten.mm.default", (a.type, b.type), (gate,), cost)
        passes = _gates(layer, speeds, cells, resources) * layer.steps
        parts.add(operator.operator, (gate,), (state.type,), passes)
        between = rows * layer.gates * basics.machine_bytes(layer.value(1).type)
        return parts.cost(between, resources.tiles)

    return price


def _backward(speeds: tuple[Speed, ...], gates: int) -> Price:
    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        layer, parts = _Layer.of(operator, roles), basics.PartCosts(operator)
        values, proportion = arguments(operator, roles), proportion_of(operator, resources)
        cells, rows = layer.gates // gates, layer.steps * layer.batch
        state = layer.value(layer.batch, layer.outputs)
        gate, all_gates = layer.value(layer.batch, layer.gates), layer.value(rows, layer.gates)
        passes = _gates(layer, speeds, cells, resources) * layer.steps
        parts.add(operator.operator, (state.type,), (gate.type,), passes)
        products = [(gate, layer.wh, layer.steps)]
        if values["of_x"]:
            products.append((all_gates, layer.wi, 1))
        if values["of_weights"]:
            transposed = layer.value(layer.gates, rows)
            products.append((transposed, _as(layer.x, rows, layer.inputs), 1))
            products.append((transposed, layer.value(rows, layer.outputs), 1))
            bias = TensorType(gate.type.dtype, (layer.gates,))
            elements = basics.numel(all_gates.type)
            cost = basics.reduce(elements, layer.gates, bias.dtype, resources)
            cost += basics.touching(basics.machine_bytes(all_gates.type), resources)
            parts.add("aten.sum.dim_IntList", (all_gates.type,), (bias,), cost)
        for a, b, times in products:
            cost = matmul(a, b, resources, proportion, resources.partials) * times
            result = layer.value(a.shape[0], b.shape[1]).type
            parts.add("aten.mm.default", (a.type, b.type), (result,), cost)
        return parts.cost(basics.machine_bytes(all_gates.type), resources.tiles)

    return price


PRICES: Mapping[str, Price] = {
    "ipu.lstm.default": _forward(_LSTM, 4),
    "ipu.gru.default": _forward(_GRU, 3),
    "ipu.rnn.default": _forward(_RNN, 1),
    "ipu.lstm_backward.default": _backward(_LSTM_BACKWARD, 4),
    "ipu.gru_backward.default": _backward(_GRU_BACKWARD, 3),
    "ipu.rnn_backward.default": _backward(_RNN_BACKWARD, 1),
}

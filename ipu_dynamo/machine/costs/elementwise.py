"""Price operators that go over their results once, vector by vector.

Figures are worker cycles for a vector of 4 halves or 2 floats. Of a range it is the higher one.
Integers count as floats, booleans as halves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ipu_dynamo.machine.cost import Cost, Price, Resources, Roles
from ipu_dynamo.machine.costs import basics
from ipu_dynamo.machine.figure import Figure, Mark
from ipu_dynamo.program.machine_operators import MachineOperator

_ESTIMATORS = "estimators of graphcore/poplibs popops"
_BUNDLES = "two bundles for a vector out of place, one in place"


@dataclass(frozen=True, slots=True)
class Speed:
    """Worker cycles for a vector: of halves, of floats; in place if that is faster."""

    half: Figure
    float: Figure
    in_place: Figure | None = None

    def of(self, vector: int, in_place: bool) -> Figure:
        """The cycles for vectors of so many elements."""
        if in_place and self.in_place is not None:
            return self.in_place
        return self.half if vector == 4 else self.float

    def __add__(self, other: "Speed") -> "Speed":
        """One after the other, without a result between."""
        mark: Mark = "D" if {self.half.mark, other.half.mark} <= {"F", "D"} else "M"
        return _speed(self.half + other.half, self.float + other.float, mark, "sum of parts")


def _speed(half: float, float_: float, mark: Mark, source: str, in_place: float = 0) -> Speed:
    first, second, third = (
        Figure(cycles, "cycles/vector", mark, source) for cycles in (half, float_, in_place)
    )
    return Speed(first, second, third if in_place else None)


def _read(half: float, float_: float) -> Speed:
    return _speed(half, float_, "F", _ESTIMATORS)


def _guess(half: float, float_: float) -> Speed:
    return _speed(half, float_, "M", "no figure was found")


ARITHMETIC = _speed(2, 2, "D", _BUNDLES, in_place=1)
THREE_OPERANDS = _speed(3, 3, "D", _BUNDLES, in_place=2)
EXP, LOG = _read(4, 6), _read(4, 12)
DIVIDE, MAXIMUM = _read(21, 10), _read(4, 4)
SIGMOID, TANH = _read(6, 12), _read(4, 12)
DROPOUT, DROPOUT_BACKWARD = _guess(2, 2), _guess(4, 4)
CAST, COMPARE, SELECT = _guess(1, 1), _guess(2, 2), _guess(3, 3)
_RELU, _RELU_BACKWARD, _CURVE_BACKWARD = _read(3, 3), _guess(3, 3), _guess(4, 4)
_SINE = _read(4 * 25, 2 * 2300)
_ERF = _read(4 * 13, 2 * 41)
_GELU, _GELU_TANH = _read(4 * 16, 2 * 22), _read(5, 10)
_GELU_BACKWARD = _guess(12, 24)
_POWER = LOG + _read(1, 1) + EXP
_SQRT, _RSQRT, _INVERSE = _read(23, 10), _read(19, 8), _read(15, 6)

_NAMES = (  # of ATen, without overloads
    (ARITHMETIC, "add sub mul rsub neg abs sign sgn square floor ceil round trunc frac copysign"),
    (ARITHMETIC, "logical_and logical_or logical_xor logical_not ldexp deg2rad rad2deg"),
    (ARITHMETIC, "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift"),
    (ARITHMETIC, "bitwise_right_shift __lshift__ __rshift__ __xor__ __and__ __or__"),
    (THREE_OPERANDS, "addcmul lerp"),
    (COMPARE, "eq ne lt le gt ge isnan isinf isfinite isneginf isposinf signbit heaviside"),
    (SELECT, "where tril triu masked_fill"),
    (CAST, "_to_copy"),
    (MAXIMUM, "maximum minimum fmax fmin clamp_min clamp_max"),
    (MAXIMUM + MAXIMUM, "clamp clip hardtanh relu6"),
    (EXP, "exp exp2 expm1"),
    (LOG, "log log2 log10 log1p"),
    (_SINE, "cos sin"),
    (_ERF, "erf erfc"),
    (_SQRT, "sqrt"),
    (_RSQRT, "rsqrt"),
    (_INVERSE, "reciprocal"),
    (TANH, "tanh"),
    (SIGMOID, "sigmoid"),
    (DIVIDE, "div true_divide floor_divide fmod remainder"),
    (DIVIDE + THREE_OPERANDS, "addcdiv"),
    (_POWER, "pow float_power"),
    (DROPOUT, "native_dropout bernoulli rand rand_like randint randint_like uniform"),
    (DROPOUT_BACKWARD, "native_dropout_backward"),
    (_RELU, "relu threshold leaky_relu hardshrink softshrink _prelu_kernel"),
    (_RELU_BACKWARD, "threshold_backward leaky_relu_backward hardtanh_backward"),
    (_RELU_BACKWARD, "hardshrink_backward softshrink_backward _prelu_kernel_backward"),
    (_CURVE_BACKWARD, "sigmoid_backward tanh_backward"),
    (_GELU_BACKWARD, "gelu_backward"),
    (SIGMOID + ARITHMETIC, "silu glu"),
    (SIGMOID + _CURVE_BACKWARD, "silu_backward glu_backward"),
    (SIGMOID + LOG, "log_sigmoid_forward"),
    (SIGMOID + ARITHMETIC + ARITHMETIC, "log_sigmoid_backward"),
    (EXP + LOG + SELECT, "softplus"),
    (SIGMOID + ARITHMETIC + SELECT, "softplus_backward"),
    (EXP + LOG + TANH + ARITHMETIC, "mish"),
    (EXP + SELECT, "elu celu selu"),
    (EXP + SELECT + ARITHMETIC, "elu_backward"),
    (ARITHMETIC + MAXIMUM + MAXIMUM, "hardsigmoid"),
    (ARITHMETIC + MAXIMUM + MAXIMUM + ARITHMETIC, "hardswish"),
    (SELECT + ARITHMETIC + ARITHMETIC, "hardsigmoid_backward hardswish_backward"),
    (ARITHMETIC + ARITHMETIC, "mse_loss_backward"),
    (MAXIMUM + MAXIMUM + ARITHMETIC, "smooth_l1_loss_backward huber_loss_backward"),
    (DIVIDE + ARITHMETIC + ARITHMETIC, "binary_cross_entropy_backward logit_backward"),
    (EXP + LOG + TANH + SIGMOID + THREE_OPERANDS, "mish_backward"),
    (DIVIDE + LOG, "logit"),
    (THREE_OPERANDS, "addr"),
    (MAXIMUM + EXP + LOG + ARITHMETIC, "logaddexp logaddexp2"),
    (LOG + ARITHMETIC, "xlogy"),
    (THREE_OPERANDS + _SQRT, "hypot"),
    (EXP + _INVERSE + ARITHMETIC, "sinh cosh"),
    (COMPARE + SELECT, "nan_to_num"),
)
SPEEDS: Mapping[str, Speed] = {name: speed for speed, names in _NAMES for name in names.split()}
_UNKNOWN = _guess(4, 4)


def _elementwise(speed: Speed) -> Price:
    """The price of a pass over the first result."""

    def price(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
        return over_result(operator, speed, resources, roles)

    return price


def over_result(
    operator: MachineOperator, speed: Speed, resources: Resources, roles: Roles
) -> Cost:
    """A pass over the first result; operands that are smaller and no weights are sent first.

    The result takes the memory of the first operand if that dies and has as many bytes.
    """
    if not operator.results:
        return Cost()
    result = operator.results[0]
    elements, nbytes = basics.numel(result), basics.machine_bytes(result)
    first = operator.operands[:1]
    in_place = 0 in roles.dying and basics.machine_bytes(*first) == nbytes
    vector = basics.vector_width(result.dtype)
    cost = basics.elementwise(elements, result.dtype, speed.of(vector, in_place), resources)
    for place, operand in enumerate(operator.operands):
        if basics.numel(operand) < elements and place not in roles.weights:
            cost += basics.exchange(basics.machine_bytes(operand), resources)
    cost += basics.touching(basics.machine_bytes(*operator.operands) + nbytes, resources)
    return replace(cost, in_place=in_place)


def _gelu(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """The price of GELU in either form."""
    node = operator.node
    tanh = node is not None and node.kwargs.get("approximate") == "tanh"
    return over_result(operator, _GELU_TANH if tanh else _GELU, resources, roles)


def unknown(operator: MachineOperator, resources: Resources, roles: Roles) -> Cost:
    """Guess the price of an operator without a formula: a slow pass over its results."""
    cost = basics.run(resources)
    cost += basics.touching(basics.machine_bytes(*operator.results), resources)
    for result in operator.results:
        speed = _UNKNOWN.of(basics.vector_width(result.dtype), False)
        cost += basics.vectors(basics.numel(result), result.dtype, speed, resources)
    return replace(cost, known=False)


PRICES: Mapping[str, Price] = {  # by the name, mostly without the overload
    **{f"aten.{name}": _elementwise(speed) for name, speed in SPEEDS.items()},
    "ipu.round_stochastically": _elementwise(CAST),
    "ipu.to_int32": _elementwise(CAST),
    "aten.gelu": _gelu,
    "aten.max.other": _elementwise(MAXIMUM),
    "aten.min.other": _elementwise(MAXIMUM),
}

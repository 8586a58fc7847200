"""Draw random numbers from a counter, so that they depend on nothing but what the user wrote.

Before   %d: f32[m,n] = aten.native_dropout(%x, 0.1, True)
After    %r: i32[m,n] = mix(index + key + number of the operator);  %mask = %r >= threshold; ...
Keeps    shapes, dtypes, source lines, distributions. The values are a function of the seed, the
         call, the micro-batch, the replica, the operator's position in the whole graph and the
         element: placement, schedule, engine and recomputation change no bit.
Source   the 32-bit mixing function is "lowbias32" (C. Wellons, hash-prospector), applied twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi, prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import RANDOM_KEY, Capture, Placeholder
from ipu_dynamo.capture.torch_private import fake_mode_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.passes.insert import call

aten = torch.ops.aten

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SHIFTS = (16, 15, 16)
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # of a fraction; float32 has 24
_NUMBER_STEPS = (0x9E3779B9, 0x85EBCA6B)  # apart the operators of one graph
STREAM = "ipu.stream"  # key of the meta of `key[word] + offset(word, stream)`: the two numbers


@dataclass
class Drawing:
    """Operators that draw for one node; `number` is the node's position among random ones.

    They go to the graph's insertion point.
    """

    graph: fx.Graph
    key: fx.Node
    node: fx.Node
    number: int
    draws: int = 0

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, placed and blamed where the node is."""
        return call(self.graph, target, *args, origin=self.node, **kwargs)

    def bits(self, shape: tuple[int, ...]) -> fx.Node:
        """Uniform 32-bit integers of `shape`; every call gives others."""
        stream = 8 * self.number + self.draws  # at most 8 draws for one operator
        self.draws += 1
        device = self.key.meta["val"].device
        index = self.op(aten.arange.default, prod(shape), dtype=torch.int32, device=device)
        value = self.op(aten.view.default, index, list(shape))
        for word in range(len(_NUMBER_STEPS)):
            part = self.op(aten.select.int, self.key, 0, word)
            part = self.op(aten.add.Tensor, part, offset(word, stream))
            part.meta[STREAM] = (word, stream)
            value = self.mix(self.op(aten.add.Tensor, value, part))
        return value

    def mix(self, value: fx.Node) -> fx.Node:
        for shift, factor in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
            shifted = self.op(aten.bitwise_right_shift.Tensor_Scalar, value, shift)
            shifted = self.op(aten.bitwise_and.Scalar, shifted, (1 << (32 - shift)) - 1)
            value = self.op(aten.bitwise_xor.Tensor, value, shifted)
            if factor != 1:
                value = self.op(aten.mul.Tensor, value, _signed(factor))
        return value

    def fraction(self, shape: tuple[int, ...], digits: int = 24) -> fx.Node:
        """Uniform float32 numbers k / 2**digits of [0, 1)."""
        top = self.op(aten.bitwise_right_shift.Tensor_Scalar, self.bits(shape), 32 - digits)
        top = self.op(aten.bitwise_and.Scalar, top, (1 << digits) - 1)
        number = self.op(aten._to_copy.default, top, dtype=torch.float32)
        return self.op(aten.mul.Tensor, number, 2.0**-digits)

    def result_fraction(self) -> fx.Node:
        """Fractions that the dtype of the result holds exactly: rounding would give 1."""
        value = self.node.meta["val"]
        return self.fraction(tuple(value.shape), _DIGITS.get(value.dtype, 24))

    def normal(self, shape: tuple[int, ...]) -> fx.Node:
        """Standard normal float32 numbers, by the method of Box and Muller."""
        positive = self.op(aten.rsub.Scalar, self.fraction(shape), 1.0)  # of (0, 1]
        squared = self.op(aten.mul.Tensor, self.op(aten.log.default, positive), -2.0)
        angle = self.op(aten.mul.Tensor, self.fraction(shape), 2 * pi)
        radius = self.op(aten.sqrt.default, squared)
        return self.op(aten.mul.Tensor, radius, self.op(aten.cos.default, angle))

    def happens(self, shape: tuple[int, ...], probability: float) -> fx.Node:
        """Booleans that are true with `probability`, to 32 bits."""
        threshold = round(probability * 2**32) - 2**31
        if threshold >= 2**31:  # no int32: always
            return self.op(aten.ge.Scalar, self.bits(shape), -(1 << 31))
        return self.op(aten.lt.Scalar, self.bits(shape), threshold)

    def as_result(self, value: fx.Node) -> fx.Node:
        """`value` in the dtype that the operator gives."""
        dtype = self.node.meta["val"].dtype
        if value.meta["val"].dtype == dtype:
            return value
        return self.op(aten._to_copy.default, value, dtype=dtype)


def _dropout(d: Drawing) -> tuple[fx.Node, ...]:
    x, p, train = _completed(d.node.args, (None, None, None))
    value = _val(x)
    if train is False or p == 0.0:
        kept = d.op(aten.ones_like.default, x, dtype=torch.bool)
        return d.op(aten.clone.default, x), kept
    assert isinstance(p, float | int)
    mask = d.happens(tuple(value.shape), 1.0 - p)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    scaled = d.op(aten.mul.Tensor, d.op(aten.mul.Tensor, x, mask), scale)
    return scaled, mask


def _bernoulli_of(d: Drawing) -> tuple[fx.Node, ...]:
    """Probabilities are the elements of the first argument."""
    value = _val(d.node.args[0])
    drawn = d.op(aten.lt.Tensor, d.fraction(tuple(value.shape)), d.node.args[0])
    return (d.as_result(drawn),)


def _bernoulli_p(d: Drawing) -> tuple[fx.Node, ...]:
    p = d.node.args[1] if len(d.node.args) > 1 else d.node.kwargs.get("p", 0.5)
    if isinstance(p, fx.Node):
        drawn = d.op(aten.lt.Tensor, d.fraction(_shape(d)), p)
    else:
        drawn = d.happens(_shape(d), float(p))  # type: ignore[arg-type]
    return (d.as_result(drawn),)


def _rand(d: Drawing) -> tuple[fx.Node, ...]:
    return (d.as_result(d.result_fraction()),)


def _randn(d: Drawing) -> tuple[fx.Node, ...]:
    return (d.as_result(d.normal(_shape(d))),)


def _uniform(d: Drawing) -> tuple[fx.Node, ...]:
    low, high = _completed(d.node.args[1:], (0.0, 1.0))
    span = d.op(aten.mul.Tensor, d.result_fraction(), high - low)
    return (d.as_result(d.op(aten.add.Tensor, span, low)),)


def _normal(d: Drawing) -> tuple[fx.Node, ...]:
    """Mean and deviation follow the tensor, or are tensors themselves."""
    numbers = [a for a in d.node.args if not isinstance(a, list | tuple)]
    if d.node.target in (aten.normal_functional.default,):
        numbers = numbers[1:]
    mean, deviation = _completed(numbers, (0.0, 1.0))
    scaled = d.op(aten.mul.Tensor, d.normal(_shape(d)), deviation)
    return (d.as_result(d.op(aten.add.Tensor, scaled, mean)),)


def _exponential(d: Drawing) -> tuple[fx.Node, ...]:
    rate = d.node.args[1] if len(d.node.args) > 1 else d.node.kwargs.get("lambd", 1.0)
    positive = d.op(aten.rsub.Scalar, d.fraction(_shape(d)), 1.0)
    scaled = d.op(aten.mul.Tensor, d.op(aten.log.default, positive), -1.0 / rate)  # type: ignore[operator]
    return (d.as_result(scaled),)


def _randint(d: Drawing) -> tuple[fx.Node, ...]:
    numbers = [a for a in d.node.args if isinstance(a, int)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    if high - low > 1 << 24:
        raise CompileError(
            f"a random integer of {high - low} values; the machine draws among at most 2**24",
            node=d.node,
            hint="draw a smaller range",
        )
    scaled = d.op(aten.mul.Tensor, d.fraction(_shape(d)), float(high - low))
    whole = d.op(aten._to_copy.default, d.op(aten.floor.default, scaled), dtype=torch.int64)
    return (d.as_result(d.op(aten.add.Tensor, whole, low)),)


def _randperm(d: Drawing) -> tuple[fx.Node, ...]:
    order = d.op(aten.sort.stable, d.bits(_shape(d)), stable=True, dim=0)
    return (d.as_result(d.op(getitem, order, 1)),)


def _multinomial(d: Drawing) -> tuple[fx.Node, ...]:
    """Without replacement: the largest of weights over exponential numbers come first."""
    weights, count, replace = _completed(d.node.args, (None, 1, False))
    shape = tuple(_val(weights).shape)
    assert isinstance(count, int)
    if replace and count > 1:
        shape = (*shape[:-1], count, shape[-1])
        weights = d.op(aten.unsqueeze.default, weights, -2)
    positive = d.op(aten.rsub.Scalar, d.fraction(shape), 1.0)
    time = d.op(aten.neg.default, d.op(aten.log.default, positive))
    time = d.op(aten.clamp_min.default, time, 2.0**-25)  # a weight of zero never wins
    race = d.op(aten.div.Tensor, weights, time)
    if replace and count > 1:
        return (d.op(aten.argmax.default, race, -1),)
    best = d.op(aten.topk.default, race, count, -1)
    return (d.op(getitem, best, 1),)


def _rrelu(d: Drawing) -> tuple[fx.Node, ...]:
    """Slopes of negative elements are uniform; gives the result and the slopes."""
    x, noise, low, high, train = _completed(d.node.args, (None, None, 0.125, 1 / 3, False))
    if not train:
        sloped = d.op(aten.leaky_relu.default, x, (low + high) / 2)
        return sloped, d.op(aten.clone.default, noise)
    span = d.op(aten.mul.Tensor, d.fraction(tuple(_val(x).shape)), high - low)
    slope = d.op(aten._to_copy.default, d.op(aten.add.Tensor, span, low), dtype=_val(x).dtype)
    slopes = d.op(aten.where.ScalarOther, d.op(aten.le.Scalar, x, 0), slope, 1.0)
    return d.op(aten.mul.Tensor, x, slopes), slopes


_DRAW: dict[Any, Callable[[Drawing], tuple[fx.Node, ...]]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.default: _bernoulli_of,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.Tensor: _bernoulli_p,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.uniform.default: _uniform,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.float_float: _normal,
    aten.normal_functional.default: _normal,
    aten.exponential.default: _exponential,
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randint_like.default: _randint,
    aten.randint_like.low_dtype: _randint,
    aten.randperm.default: _randperm,
    aten.multinomial.default: _multinomial,
    aten.rrelu_with_noise_functional.default: _rrelu,
}


def plan(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The random operators, in graph order."""
    return tuple(node for node in graph.nodes if draws(node))


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention without dropout does not."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def random_streams(capture: Capture) -> bool:
    """The pass."""
    nodes = plan(capture.graph.graph)
    if not nodes:
        return False
    key = key_input(capture)
    graph = capture.graph.graph
    for number, node in enumerate(nodes):
        draw = _DRAW.get(node.target)
        if draw is None:
            raise CompileError(
                f"the random operator {node.target} has no counter-based form",
                node=node,
                hint="draw with torch.rand, randn, bernoulli, randint, multinomial or dropout",
            )
        with graph.inserting_before(node):
            results = draw(Drawing(graph, key, node, number))
        _replace(graph, node, results)
    graph.eliminate_dead_code()
    capture.graph.recompile()
    return True


def key_input(capture: Capture) -> fx.Node:
    """The input for the key; added after the other placeholders if there is none."""
    nodes = capture.placeholder_nodes
    for node, role in capture.roles().items():
        if role.kind == "random_key":
            return node
    with capture.graph.graph.inserting_after(nodes[-1] if nodes else None):
        key = capture.graph.graph.placeholder(RANDOM_KEY)
    with fake_mode_of([n.meta["val"] for n in capture.graph.graph.nodes if "val" in n.meta]):
        key.meta["val"] = torch.empty(2, dtype=torch.int32, device=_device(capture))
    capture.placeholders = (*capture.placeholders, Placeholder(RANDOM_KEY, "random_key"))
    return key


def _device(capture: Capture) -> torch.device:
    """Where the model's tensors are."""
    values = (n.meta.get("val") for n in capture.graph.graph.nodes)
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))


def _replace(graph: fx.Graph, node: fx.Node, results: tuple[fx.Node, ...]) -> None:
    if isinstance(node.meta["val"], torch.Tensor):
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    graph.erase_node(node)


def _completed(given: Sequence[Any], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments, with the defaults of those that are left out."""
    return (*given, *defaults[len(given) :])[: len(defaults)]


def _val(argument: Any) -> torch.Tensor:
    value: torch.Tensor = argument.meta["val"]
    return value


def _shape(d: Drawing) -> tuple[int, ...]:
    return tuple(d.node.meta["val"].shape)


def offset(word: int, stream: int) -> int:
    """What a stream adds to a word of the key; of the sum of two streams' offsets one is too much
    by that of stream -1, which is 0."""
    return _signed(_NUMBER_STEPS[word] * (stream + 1))


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)

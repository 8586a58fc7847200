"""Draw random numbers from a counter, so that they depend on nothing but what the user wrote.

Before   %d: f32[m,n] = aten.native_dropout(%x, 0.1, True)
After    %r: i32[m,n] = mix(index + key + number of the operator);  %mask = %r >= threshold; ...
Keeps    shapes, dtypes, source lines, distributions. The values are a function of the seed, the
         call, the micro-batch, the replica, the operator's position in the whole graph and the
         element: placement, schedule, engine and recomputation change no bit.
Source   Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): numbers of a counter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log1p, pi
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import fx

from ipu_dynamo.capture.capture import RANDOM_KEY, Capture, Placeholder
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import Drawing
from ipu_dynamo.passes.joint.random_numbers.draw_in_bodies import draw_in_bodies
from ipu_dynamo.passes.levels import Level

aten = torch.ops.aten


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


def _cauchy(d: Drawing) -> tuple[fx.Node, ...]:
    median, scale = _completed(d.node.args[1:], (0.0, 1.0))
    angle = d.op(aten.mul.Tensor, d.op(aten.sub.Tensor, d.fraction(_shape(d)), 0.5), pi)
    scaled = d.op(aten.mul.Tensor, d.op(aten.tan.default, angle), scale)
    return (d.as_result(d.op(aten.add.Tensor, scaled, median)),)


def _log_normal(d: Drawing) -> tuple[fx.Node, ...]:
    mean, deviation = _completed(d.node.args[1:], (1.0, 2.0))
    scaled = d.op(aten.mul.Tensor, d.normal(_shape(d)), deviation)
    power = d.op(aten.exp.default, d.op(aten.add.Tensor, scaled, mean))
    return (d.as_result(power),)


def _geometric(d: Drawing) -> tuple[fx.Node, ...]:
    """How many trials it takes until one of probability p succeeds."""
    p: Any = d.node.args[1]
    positive = d.op(aten.rsub.Scalar, d.fraction(_shape(d)), 1.0)
    time = d.op(aten.mul.Tensor, d.op(aten.log.default, positive), 1.0 / log1p(-p))
    trials = d.op(aten.clamp_min.default, d.op(aten.ceil.default, time), 1.0)
    return (d.as_result(trials),)


def _random(d: Drawing) -> tuple[fx.Node, ...]:
    """Integers below a number, from one on, or all that the dtype holds without gaps."""
    bounds: list[Any] = [*d.node.args[1:]]
    low, high = bounds if len(bounds) == 2 else (0, *bounds, None)[:2]
    return _integers(d, low, _end(d.node.meta["val"].dtype) if high is None else high)


def _end(dtype: torch.dtype) -> int:
    """Below it, `dtype` holds all positive integers."""
    if dtype.is_floating_point:
        return 2 * round(1 / torch.finfo(dtype).eps)
    return 2 if dtype == torch.bool else int(torch.iinfo(dtype).max) + 1


def _randint(d: Drawing) -> tuple[fx.Node, ...]:
    numbers = [a for a in d.node.args if isinstance(a, int)]
    return _integers(d, *((0, numbers[0]) if len(numbers) == 1 else numbers[:2]))


def _integers(d: Drawing, low: int, high: int) -> tuple[fx.Node, ...]:
    """Integers of low to high - 1."""
    if high - low > 1 << 24:
        raise CompileError(
            f"a random integer of {high - low} values; the machine draws among at most 2**24",
            node=d.node,
            hint="draw a smaller range",
            id="operator",
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
    aten.cauchy.default: _cauchy,
    aten.log_normal.default: _log_normal,
    aten.geometric.default: _geometric,
    aten.random.default: _random,
    aten.random.to: _random,
    getattr(aten.random, "from"): _random,
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
    """Whether a node draws random numbers, or a body that it runs does; attention without dropout
    does not."""
    if any(draws(inner) for body in bodies_of(node) for inner in body.graph.graph.nodes):
        return True
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    probability = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


@dataclass(frozen=True)
class CounterRandom:
    """The pass."""

    name: ClassVar[str] = "CounterRandom"
    level: ClassVar[Level] = "joint"
    needed: ClassVar[str] = "stages, workers and recomputation would draw other numbers"

    def __call__(self, capture: Capture) -> bool:
        nodes = plan(capture.graph.graph)
        if not nodes:
            return False
        graph = capture.graph.graph
        draw_all(graph, key_input(capture), 0)
        graph.eliminate_dead_code()
        capture.graph.recompile()
        return True


def draw_all(graph: fx.Graph, key: fx.Node, first: int) -> int:
    """Rewrite the random operators of a graph, of which one has the number `first`; return that of
    the next."""
    nodes = plan(graph)
    for number, node in enumerate(nodes, first):
        with graph.inserting_before(node):
            drawing = Drawing(graph, key, node, number)
            if bodies_of(node):
                draw_in_bodies(drawing, draw_all)
            else:
                _replace(graph, node, _draw(drawing))
    return first + len(nodes)


def _draw(drawing: Drawing) -> tuple[fx.Node, ...]:
    """What takes the place of a random operator's results."""
    node = drawing.node
    draw = _DRAW.get(node.target)
    if draw is None:
        raise CompileError(
            f"the random operator {node.target} has no counter-based form",
            node=node,
            hint="draw with torch.rand, randn, bernoulli, randint, multinomial or dropout",
            id="operator",
        )
    return draw(drawing)


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


def _completed(args: Sequence[Any], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments, with the defaults of those that are left out."""
    return (*args, *defaults[len(args) :])[: len(defaults)]


def _val(argument: Any) -> torch.Tensor:
    value: torch.Tensor = argument.meta["val"]
    return value


def _shape(d: Drawing) -> tuple[int, ...]:
    return tuple(d.node.meta["val"].shape)

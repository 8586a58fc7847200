"""Write every random operator of PyTorch that has a form by counter: the table of those forms."""

from collections.abc import Callable, Sequence
from math import log1p, pi
from operator import getitem
from typing import Any

import torch
from torch import fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import Drawing


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


def _completed(args: Sequence[Any], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments, with the defaults of those that are left out."""
    return (*args, *defaults[len(args) :])[: len(defaults)]


def _val(argument: Any) -> torch.Tensor:
    value: torch.Tensor = argument.meta["val"]
    return value


def _shape(d: Drawing) -> tuple[int, ...]:
    return tuple(d.node.meta["val"].shape)


DRAW: dict[Any, Callable[[Drawing], tuple[fx.Node, ...]]] = {
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

"""Name the tensors of each optimiser on the device: its states, accumulators and numbers.

A number is a tensor that the host may write between two steps. A number that depends on constant
attributes alone is part of the program and has no tensor.

Source   PopART 3.4: the compound scalars of its SGD, Adam and adaptive optimisers, and the state
         tensors that its optimisers are decomposed into.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ipu_dynamo import options as core
from poptorch.optim import GroupReading, Reading

_ADAM = {"exp_avg": "Accl1", "exp_avg_sq": "Accl2", "step": "Step"}
_STATES = {  # variant -> the core's name of a state -> PopTorch's, before "___" and the parameter
    "stateless": {},
    "combined": {"momentum_buffer": "Accl"},
    "separate": {"momentum_buffer": "Accl1"},
    "adam": _ADAM,
    "adamw": _ADAM,
    "lamb": _ADAM,
    "lamb without correction": {own: name for own, name in _ADAM.items() if own != "step"},
    "rmsprop": {"square_avg": "Accl1", "grad_avg": "Accl2", "momentum_buffer": "Accl3"},
}


@dataclass(frozen=True, slots=True)
class Number:
    """A number of an update.

    Args:
        name: before "___specific___" and the parameter.
        of: the attributes that it is made of.
        value: computes it from these attributes and `_divisors` of the program.
        as_weight: its dtype is the parameter's; else it is float32.
    """

    name: str
    of: tuple[str, ...]
    value: Callable[[Any], float]
    as_weight: bool = False


_SCALE = "loss_scaling"
_STATELESS = (
    Number(
        "scaledLearningRate0",
        ("lr", "dampening", _SCALE),
        lambda v: v.lr * (1 - v.dampening) / (v.loss_scaling * v.divisor),
    ),
    Number(
        "weightDecayScaleFactor0",
        ("lr", "dampening", "weight_decay"),
        lambda v: 1 - v.lr * (1 - v.dampening) * v.weight_decay,
        as_weight=True,
    ),
)
_OF_VELOCITY = ("dampening", "velocity_scaling", _SCALE)
_COMBINED = (
    Number(
        "scaledLearningRate1",
        ("lr", "velocity_scaling"),
        lambda v: v.lr / (v.velocity_scaling * v.summed),
    ),
    Number("scaledMomentum1", ("momentum",), lambda v: v.momentum / v.summed, as_weight=True),
    Number(
        "dampeningScaleFactor1",
        _OF_VELOCITY,
        lambda v: (1 - v.dampening) * v.velocity_scaling * v.share / (v.loss_scaling * v.micro),
    ),
    Number(
        "scaledWeightDecay1",
        ("dampening", "weight_decay", "velocity_scaling"),
        lambda v: (1 - v.dampening) * v.weight_decay * v.velocity_scaling,
    ),
)
_SEPARATE = (  # the velocity is scaled as the loss is
    Number("scaledLearningRate2", ("lr", _SCALE), lambda v: v.lr / v.loss_scaling),
    Number("scaledMomentum2", ("momentum",), lambda v: v.momentum, as_weight=True),
    Number(
        "dampeningScaleFactor2",
        ("dampening", _SCALE),
        lambda v: (1 - v.dampening) / v.divisor,
    ),
    Number(
        "scaledWeightDecay1",
        ("dampening", "weight_decay", _SCALE),
        lambda v: (1 - v.dampening) * v.weight_decay * v.loss_scaling,
    ),
)
_NESTEROV = (
    Number("sgdMomentum", ("momentum",), lambda v: v.momentum, as_weight=True),
    Number("sgdWeightDecay", ("weight_decay",), lambda v: v.weight_decay),
)
_COMBINED_NESTEROV = (
    *_NESTEROV,
    Number(
        "nesterovGradScaleFactor1",
        ("velocity_scaling",),
        lambda v: v.velocity_scaling * v.summed,
    ),
    Number(
        "nesterovDampeningScaleFactor1",
        _OF_VELOCITY,
        lambda v: _over(v.micro, (1 - v.dampening) * v.velocity_scaling * v.share),
    ),
)
_SEPARATE_NESTEROV = (
    *_NESTEROV,
    Number("nesterovGradScaleFactor2", (_SCALE,), lambda v: v.loss_scaling),
    Number(
        "nesterovDampeningScaleFactor2",
        ("dampening", _SCALE),
        lambda v: _over(v.divisor, (1 - v.dampening) * v.loss_scaling),
    ),
)
_RATE = Number("learningRate", ("lr",), lambda v: v.lr)
_DECAY = Number("weightDecay", ("weight_decay",), lambda v: v.weight_decay)


def _over(number: float, divisor: float) -> float:
    return number / divisor if divisor else math.inf


def _unscaling(v: Any) -> float:
    """The factor on gradients before they reach the moments."""
    return float(1 / (v.loss_scaling * v.divisor))


_MOMENTS = (
    _RATE,
    _DECAY,
    Number("adamBeta1", ("betas",), lambda v: v.betas[0]),
    Number("adamBeta2", ("betas",), lambda v: v.betas[1]),
    Number("adamEps", ("eps",), lambda v: v.eps),
    Number("adamGradientScaling", (_SCALE,), _unscaling),
)
_LAMB = (*_MOMENTS, Number("maxWeightNorm", ("max_weight_norm",), lambda v: v.max_weight_norm))
_NUMBERS = {
    "stateless": _STATELESS,
    "combined": _COMBINED,
    "separate": _SEPARATE,
    "combined nesterov": (*_COMBINED, *_COMBINED_NESTEROV),
    "separate nesterov": (*_SEPARATE, *_SEPARATE_NESTEROV),
    "adam": _MOMENTS,
    "adamw": _MOMENTS,
    "lamb": _LAMB,
    "lamb without correction": _LAMB,
    "rmsprop": (
        _RATE,
        _DECAY,
        Number("adaptiveAlpha", ("alpha",), lambda v: v.alpha),
        Number("adaptiveEps", ("eps",), lambda v: v.eps),
        Number("adaptiveMomentum", ("momentum",), lambda v: v.momentum),
        Number("adaptiveGradientScaling", (_SCALE,), _unscaling),
    ),
}


def _divisors(options: core.Options) -> dict[str, float]:
    """The numbers by which the update of a program divides sums of gradients.

    `divisor` is of all micro-batches and replicas, `micro` of the micro-batches alone. If replicas
    sum a velocity that shares the accumulator, `summed` is their number, and `share` undoes the sum
    for its gradients.
    """
    mean, after = options.reduction == "mean", options.mean_strategy
    accumulated, replicas = options.gradient_accumulation, options.replicas
    alone = accumulated == 1
    micro = accumulated if mean and after != "running" else 1
    return {
        "divisor": micro * (replicas if mean and after == "post" else 1),
        "micro": accumulated if mean else 1,
        "summed": 1 if alone else replicas,
        "share": (1 / replicas if mean else 1) if alone else (1 if mean else replicas),
    }


def states_of(reading: Reading, group: GroupReading) -> Mapping[str, str]:
    """PopTorch's names of a group's states, by the core's; the parameter comes after "___"."""
    return _STATES[_variant(reading, group)]


def zeros_of(reading: Reading, group: GroupReading) -> tuple[str, ...]:
    """The names of states that are zero between two steps, with `{}` for the parameter."""
    nesterov = _variant(reading, group) == "combined" and group.values["nesterov"]
    return ("Accl___{}_nesterovGrad",) if nesterov else ()


def has_accumulator(reading: Reading, group: GroupReading, options: core.Options) -> bool:
    """Whether gradients of a group are summed in tensors of their own."""
    return options.gradient_accumulation > 1 and _variant(reading, group) != "combined"


def numbers_of(
    reading: Reading, group: GroupReading, options: core.Options
) -> Iterator[tuple[Number, float]]:
    """The numbers of a group that are no constants of the program, with their values."""
    variant = _variant(reading, group)
    if variant in ("combined", "separate") and group.values["nesterov"]:
        variant += " nesterov"
    constant = set(group.constant)
    if reading.loss_scaling_is_constant:
        constant.add(_SCALE)
    scale = float(reading.settings[_SCALE])
    values = SimpleNamespace(**group.values, loss_scaling=scale, **_divisors(options))
    for number in _NUMBERS[variant]:
        if not constant.issuperset(number.of):
            yield number, float(number.value(values))


def states_as_in_core(reading: Reading, parameters: Iterable[str]) -> dict[str, str]:
    """The core's names of the states that are the same tensors in PopTorch, by PopTorch's."""
    if reading.kind == "sgd":  # a velocity is shown as the device would have it
        return {}
    names = states_of(reading, reading.groups[0]).items()
    return {f"{theirs}___{p}": f"{p}.{own}" for own, theirs in names for p in parameters}


def _variant(reading: Reading, group: GroupReading) -> str:
    """The row of the tables that a group belongs to."""
    if reading.kind == "sgd":
        if not group.has_momentum:
            return "stateless"
        return "combined" if reading.settings["use_combined_accum"] else "separate"
    if reading.kind == "lamb" and not reading.settings["bias_correction"]:
        return "lamb without correction"
    return reading.kind

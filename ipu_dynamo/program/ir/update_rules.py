"""Describe the computation of an optimiser step: rules that passes, programs, runtime share.

A rule holds no tensor and no number that may change from call to call: two steps with the same rule
are one compiled step. Names are those of `torch.optim`, and so are the equations, unless a flag
says otherwise. In the equations g is the gradient after accumulation, reduction, division and
clipping, w the weight, wd the weight decay; with `maximize` g is negated first.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple

import torch

from ipu_dynamo.ops.updates.update_functions import HYPERPARAMETERS
from ipu_dynamo.program.ir.types import DTYPES, TensorType

_CALL = re.compile(r"(\w+)\((.*)\)")


class StateSpec(NamedTuple):
    """A tensor that a rule keeps for every parameter from step to step.

    `scalar` states are 0-dim; parameters that always step together may share one tensor.
    `dtype` is None where the state has the dtype of its parameter.
    """

    name: str
    shape: Literal["like_parameter", "scalar"]
    initial: float
    dtype: torch.dtype | None

    def type_for(self, weight: TensorType) -> TensorType:
        """The type that it has for a parameter of type `weight`."""
        shape = weight.shape if self.shape == "like_parameter" else ()
        return TensorType(self.dtype or weight.dtype, shape)


@dataclass(frozen=True, slots=True)
class Rule:
    """An update equation.

    Prints as `kind(flag, field=value)`, fields that have their default left out; `Rule.parse` is
    the inverse.
    """

    kind: ClassVar[str]
    hyperparameters: ClassVar[tuple[str, ...]]  # numbers per group, new at every call if wanted

    @property
    def flags(self) -> frozenset[str]:
        """The flags that are set."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is True)

    def state_names(self) -> tuple[StateSpec, ...]:
        """The states of one parameter."""
        raise NotImplementedError(f"{type(self).__name__} does not say what state it keeps")

    def state_types(self, weight: TensorType) -> tuple[TensorType, ...]:
        """The types of the states of one parameter."""
        return tuple(spec.type_for(weight) for spec in self.state_names())

    def __str__(self) -> str:
        values = ((f, getattr(self, f.name)) for f in fields(self))
        written = [_write(f.name, value) for f, value in values if value != f.default]
        return f"{self.kind}({', '.join(written)})"

    @staticmethod
    def parse(text: str) -> "Rule":
        """Inverse of `str`.

        Raises:
            ValueError: `text` is not a printed rule.
        """
        match = _CALL.fullmatch(text)
        rule = RULES.get(match[1]) if match else None
        if match is None or rule is None:
            raise ValueError(f"not an update rule: {text!r}; kinds are {', '.join(RULES)}")
        if rule is TracedRule:
            return TracedRule.read(match[2])
        known = {f.name for f in fields(rule)}
        arguments = dict(_read(part) for part in match[2].split(", ") if part)
        if unknown := arguments.keys() - known:
            raise ValueError(f"{match[1]} has no field {', '.join(sorted(unknown))}: {text!r}")
        make: Callable[..., Rule] = rule
        return make(**arguments)


@dataclass(frozen=True, slots=True)
class SGD(Rule):
    """Gradient descent.

    s = g + wd*w                            without momentum:   w <- w - lr*s
    v <- momentum*v + (1 - dampening)*s     first step of all:  v <- s
    w <- w - lr*v                           nesterov:           w <- w - lr*(s + momentum*v)

    Two flags change it to PopTorch's rule: `dampen_first_step` starts from v = 0 instead, and
    `stateless_dampening` uses lr*(1 - dampening) as the rate if there is no momentum.
    """

    momentum: bool = False
    nesterov: bool = False
    maximize: bool = False
    dampen_first_step: bool = False
    stateless_dampening: bool = False
    momentum_dtype: torch.dtype | None = None

    kind: ClassVar[str] = "sgd"
    hyperparameters: ClassVar[tuple[str, ...]] = HYPERPARAMETERS["sgd"]

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov momentum needs momentum")

    def state_names(self) -> tuple[StateSpec, ...]:
        """`momentum_buffer`, and `momentum_started`: 0 until the buffer has its first value."""
        if not self.momentum:
            return ()
        buffer = StateSpec("momentum_buffer", "like_parameter", 0.0, self.momentum_dtype)
        if self.dampen_first_step:
            return (buffer,)
        return buffer, StateSpec("momentum_started", "scalar", 0.0, torch.float32)


@dataclass(frozen=True, slots=True)
class Adam(Rule):
    """Adam; with `decoupled_weight_decay` AdamW.

    s = g + wd*w                            decoupled:  s = g,  w <- w*(1 - lr*wd) first
    m <- beta1*m + (1 - beta1)*s            v <- beta2*v + (1 - beta2)*s*s
    u = v                                   amsgrad:    u <- max(u, v)
    w <- w - lr * m/(1 - beta1**t) / (sqrt(u/(1 - beta2**t)) + eps)        t = 1 at the first step
    """

    decoupled_weight_decay: bool = False
    amsgrad: bool = False
    maximize: bool = False
    exp_avg_dtype: torch.dtype | None = None
    exp_avg_sq_dtype: torch.dtype | None = None

    kind: ClassVar[str] = "adam"
    hyperparameters: ClassVar[tuple[str, ...]] = HYPERPARAMETERS["adam"]

    def state_names(self) -> tuple[StateSpec, ...]:
        """`step`, the two averages, and with amsgrad the largest second one so far."""
        states = (
            StateSpec("step", "scalar", 0.0, torch.float32),
            StateSpec("exp_avg", "like_parameter", 0.0, self.exp_avg_dtype),
            StateSpec("exp_avg_sq", "like_parameter", 0.0, self.exp_avg_sq_dtype),
        )
        if not self.amsgrad:
            return states
        return (
            *states,
            StateSpec("max_exp_avg_sq", "like_parameter", 0.0, self.exp_avg_sq_dtype),
        )


@dataclass(frozen=True, slots=True)
class RMSprop(Rule):
    """RMSprop.

    s = g + wd*w                            a <- alpha*a + (1 - alpha)*s*s
    d = a                                   centered:   b <- alpha*b + (1 - alpha)*s,  d = a - b*b
    x = s / (sqrt(d) + eps)
    w <- w - lr*x                           momentum:   v <- momentum*v + x,  w <- w - lr*v
    tensorflow: a begins at 1,  x = s / sqrt(d + eps),  v <- momentum*v + lr*x,  w <- w - v
    """

    centered: bool = False
    momentum: bool = False
    maximize: bool = False
    tensorflow: bool = False
    square_avg_dtype: torch.dtype | None = None
    grad_avg_dtype: torch.dtype | None = None
    momentum_dtype: torch.dtype | None = None

    kind: ClassVar[str] = "rmsprop"
    hyperparameters: ClassVar[tuple[str, ...]] = HYPERPARAMETERS["rmsprop"]

    def state_names(self) -> tuple[StateSpec, ...]:
        """`step` (torch counts it, no equation reads it), the averages and the momentum."""
        states = [
            StateSpec("step", "scalar", 0.0, torch.float32),
            StateSpec(
                "square_avg", "like_parameter", float(self.tensorflow), self.square_avg_dtype
            ),
        ]
        if self.momentum:
            states.append(StateSpec("momentum_buffer", "like_parameter", 0.0, self.momentum_dtype))
        if self.centered:
            states.append(StateSpec("grad_avg", "like_parameter", 0.0, self.grad_avg_dtype))
        return tuple(states)


@dataclass(frozen=True, slots=True)
class LAMB(Rule):
    """Adam whose step is in proportion to the weight: norms are of a whole parameter.

    m <- beta1*m + (1 - beta1)*g            v <- beta2*v + (1 - beta2)*g*g
    x = m/(1 - beta1**t) / (sqrt(v/(1 - beta2**t)) + eps) + wd*w         t = 1 at the first step
    r = min(|w|, max_weight_norm) / |x|, or 1 where one of the norms is 0
    w <- w - lr*r*x                         uncorrected:  m and v as they are, in x

    Source: You et al., "Large batch optimization for deep learning", 2020, algorithm 2; PopTorch
    user guide, "poptorch.optim.LAMB".
    """

    uncorrected: bool = False
    exp_avg_dtype: torch.dtype | None = None
    exp_avg_sq_dtype: torch.dtype | None = None

    kind: ClassVar[str] = "lamb"
    hyperparameters: ClassVar[tuple[str, ...]] = HYPERPARAMETERS["lamb"]

    def state_names(self) -> tuple[StateSpec, ...]:
        """`step` and the two averages."""
        return (
            StateSpec("step", "scalar", 0.0, torch.float32),
            StateSpec("exp_avg", "like_parameter", 0.0, self.exp_avg_dtype),
            StateSpec("exp_avg_sq", "like_parameter", 0.0, self.exp_avg_sq_dtype),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRule(Rule):
    """A rule traced from an optimiser's own Python: functions of the program, see `traced_update`.

    Args:
        name: of the class.
        key: digest of the functions.
        hyperparameters: numbers of a group that the step reads and does not change.
    """

    name: str
    key: str
    hyperparameters: tuple[str, ...]  # type: ignore[misc]  # of each rule, not of the class

    kind: ClassVar[str] = "traced"
    WORD: ClassVar[str] = "Traced"  # in the text of programs

    def state_names(self) -> tuple[StateSpec, ...]:
        """Each parameter has its own, which the program's updates name."""
        raise NotImplementedError("the states of a traced update are in its instructions")

    def __str__(self) -> str:
        return f"traced({json.dumps([self.name, self.key, *self.hyperparameters])})"

    @classmethod
    def read(cls, text: str) -> "TracedRule":
        """Inverse of `str` for the text between the parentheses."""
        values = json.loads(text)
        if not (
            isinstance(values, list) and len(values) > 1 and all(type(v) is str for v in values)
        ):
            raise ValueError(f"not a traced update: {text!r}")
        name, key, *numbers = values
        return cls(name=name, key=key, hyperparameters=tuple(numbers))


@dataclass(frozen=True, slots=True)
class HostStep(Rule):
    """The optimiser's own step, in Python: the program ends with the gradients."""

    kind: ClassVar[str] = "host"
    hyperparameters: ClassVar[tuple[str, ...]] = ()

    def state_names(self) -> tuple[StateSpec, ...]:
        """None: the optimiser keeps its states itself."""
        return ()


RULES: dict[str, type[Rule]] = {
    rule.kind: rule for rule in (SGD, Adam, RMSprop, LAMB, TracedRule, HostStep)
}


def _write(name: str, value: object) -> str:
    """A field as text: a flag by its name, a dtype as `name=float32`."""
    return name if value is True else f"{name}={str(value).removeprefix('torch.')}"


def _read(part: str) -> tuple[str, bool | torch.dtype]:
    """Inverse of `_write`."""
    name, equals, value = part.partition("=")
    if not equals:
        return name, True
    if value not in DTYPES:
        raise ValueError(f"not a dtype: {value!r} of {name}")
    return name, DTYPES[value]

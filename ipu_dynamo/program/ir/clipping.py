"""Define how gradients are clipped before an update: rules, and the instructions that follow them.

A norm is of all gradients of a step together. Each IPU makes that of its own (`GradientNorm`), one
of them makes of these the number by which to divide (`ClipFactor`), and updates divide by it.
"""

import math
from collections.abc import Sized
from dataclasses import dataclass

from ipu_dynamo.program.ir.base_instruction import (
    AFTER,
    BaseInstruction,
    Computed,
    Use,
    divisors,
    listed,
    used,
)
from ipu_dynamo.program.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class ClipGlobalNorm:
    """Multiply all gradients of a step by max_norm / max(max_norm, n), n being their L2 norm.

    Nothing is added to n, unlike in `torch.nn.utils.clip_grad_norm_`. An infinite n makes infinite
    elements NaN and all others 0; with n NaN nothing is clipped.
    Source: PopTorch user guide, `max_grad_norm` of its optimisers.

    Args:
        max_norm: the largest L2 norm, greater than 0.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _check_limit("max_norm", self.max_norm, zero=False)

    @property
    def norm_type(self) -> float:
        """Which norm."""
        return 2.0

    def __str__(self) -> str:
        return f"clip_global_norm({self.max_norm!r})"


@dataclass(frozen=True, slots=True)
class ClipGradNorm:
    """Clip all gradients of a step as `torch.nn.utils.clip_grad_norm_` does.

    They are multiplied by min(1, max_norm / (n + 1e-6)); a norm that is NaN makes all of them NaN.

    Args:
        max_norm: the limit.
        norm_type: a positive p of the p-norm; infinity is the largest absolute value.
        error_if_nonfinite: raise before anything is updated if n is not finite.
    """

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        _check_limit("max_norm", self.max_norm, zero=True)
        if not self.norm_type > 0.0:
            raise ValueError(f"norm_type is {self.norm_type!r}; it is a positive number")

    def __str__(self) -> str:
        norm = "" if self.norm_type == 2.0 else f", norm_type={self.norm_type!r}"
        check = ", error_if_nonfinite" if self.error_if_nonfinite else ""
        return f"clip_grad_norm({self.max_norm!r}{norm}{check})"


@dataclass(frozen=True, slots=True)
class ClipGradValue:
    """Clip as `torch.nn.utils.clip_grad_value_` does: elements stay within +-`clip_value`."""

    clip_value: float

    def __post_init__(self) -> None:
        _check_limit("clip_value", self.clip_value, zero=True)

    def __str__(self) -> str:
        return f"clip_grad_value({self.clip_value!r})"


Clip = ClipGlobalNorm | ClipGradNorm | ClipGradValue


@dataclass(frozen=True, slots=True)
class GradientNorm(BaseInstruction):
    """Compute the norm of an IPU's gradients, summed over all shards and groups of replicas.

    Args:
        parameters: that are updated on this IPU.
        gradients: theirs, accumulators or copies of them; complete, but not yet divided.
        result, type: the norm, of the divided gradients.
        norm_type: p of the p-norm.
        divisor, loss_scale: what gradients are divided by, a number and a variable.
    """

    sections = AFTER

    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    result: str
    type: TensorType
    norm_type: float
    divisor: float
    ipu: int
    loss_scale: str | None = None

    @property
    def columns(self) -> tuple[tuple[str, Sized], ...]:
        return (("parameters", self.parameters), ("gradients", self.gradients))

    @property
    def reads(self) -> tuple[Use, ...]:
        return (
            *used(self.gradients, self.ipu, shard=True),
            *divisors(self.ipu, self.loss_scale),
        )

    @property
    def makes(self) -> tuple[Use, ...]:
        return (Use(self.result, self.ipu, self.type),)

    @property
    def computes(self) -> tuple[Computed, ...]:
        return tuple(Computed("norm", name) for name in self.gradients)

    def __str__(self) -> str:
        mean = _divided(self.divisor, self.loss_scale)
        norm = f"{self.norm_type:g}-norm of ({listed(self.gradients)}){mean}"
        return f"%{self.result}: {self.type} = {norm}  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class ClipFactor(BaseInstruction):
    """Make of the norms of all IPUs the number, from 1 on, by which to divide gradients.

    Args:
        norms: one for each IPU that updates parameters.
    """

    sections = AFTER

    rule: ClipGlobalNorm | ClipGradNorm
    norms: tuple[str, ...]
    result: str
    type: TensorType
    ipu: int

    @property
    def reads(self) -> tuple[Use, ...]:
        return tuple(Use(name, self.ipu, self.type) for name in self.norms)

    @property
    def makes(self) -> tuple[Use, ...]:
        return (Use(self.result, self.ipu, self.type),)

    @property
    def computes(self) -> tuple[Computed, ...]:
        return (Computed("factor", self.result),)

    def __str__(self) -> str:
        factor = f"{self.rule} by the norms ({listed(self.norms)})"
        return f"%{self.result}: {self.type} = {factor}  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class ClipValues(BaseInstruction):
    """Limit every element of an IPU's gradients, in place.

    Args:
        parameters: that are updated on this IPU.
        gradients: theirs, accumulators or copies of them; complete, but not yet divided.
        limit: of the absolute values of the divided gradients.
        divisor, loss_scale: what gradients are divided by, a number and a variable.
    """

    sections = AFTER

    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    limit: float
    divisor: float
    ipu: int
    loss_scale: str | None = None

    @property
    def columns(self) -> tuple[tuple[str, Sized], ...]:
        return (("parameters", self.parameters), ("gradients", self.gradients))

    @property
    def reads(self) -> tuple[Use, ...]:
        return divisors(self.ipu, self.loss_scale)

    @property
    def writes(self) -> tuple[Use, ...]:
        return used(self.gradients, self.ipu, shard=True)

    @property
    def computes(self) -> tuple[Computed, ...]:
        return tuple(Computed("clamp", name) for name in self.gradients)

    def __str__(self) -> str:
        mean = _divided(self.divisor, self.loss_scale)
        return f"clip ({listed(self.gradients)}){mean} to +-{self.limit!r}  on ipu{self.ipu}"


def _divided(divisor: float, loss_scale: str | None) -> str:
    """The end of a text on gradients that are divided."""
    return (f" / {divisor}" if divisor != 1 else "") + (f" / %{loss_scale}" if loss_scale else "")


def _check_limit(name: str, value: float, *, zero: bool) -> None:
    """Refuse values that are no limit; an infinite one clips nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it is a number")
    if math.isnan(value) or value < 0.0 or (value == 0.0 and not zero):
        raise ValueError(
            f"{name} is {value!r}; it is a {'number from 0 on' if zero else 'positive number'}"
        )

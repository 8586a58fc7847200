"""Read an optimizer, torch's or this package's, as the values of an update on the device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poptorch._logging import logger
from poptorch.errors import createPoptorchError, require
from poptorch.optim.adam import Adam, AdamW
from poptorch.optim.base import Optimizer
from poptorch.optim.lamb import LAMB
from poptorch.optim.rmsprop import RMSprop
from poptorch.optim.sgd import SGD


@dataclass(frozen=True, slots=True)
class _Kind:
    """The attributes that a class of optimizers has in each group.

    `neutral`: values at which torch's class keeps an attribute constant; an attribute that is not
    in it is constant always, but `lr` is variable.
    """

    name: str
    classes: tuple[type[torch.optim.Optimizer], ...]
    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    neutral: Mapping[str, float]


_MOMENTS = ("lr", "eps", "weight_decay")
_KINDS = (  # AdamW before Adam, which it derives from
    _Kind(
        "sgd",
        (SGD, torch.optim.SGD),
        ("lr", "momentum", "dampening", "weight_decay", "velocity_scaling"),
        ("nesterov",),
        {"momentum": 0, "dampening": 0, "weight_decay": 0, "velocity_scaling": 1},
    ),
    _Kind(
        "adamw",
        (AdamW, torch.optim.AdamW),
        _MOMENTS,
        (),
        {"eps": 1e-8, "weight_decay": 1e-2},
    ),
    _Kind("adam", (Adam, torch.optim.Adam), _MOMENTS, (), {"eps": 1e-8, "weight_decay": 0}),
    _Kind(
        "rmsprop",
        (RMSprop, torch.optim.RMSprop),
        ("lr", "alpha", "eps", "weight_decay", "momentum"),
        ("centered",),
        {"eps": 1e-8, "weight_decay": 0, "momentum": 0},
    ),
    _Kind("lamb", (LAMB,), (*_MOMENTS, "max_weight_norm"), (), {}),
)
_SETTINGS = {
    "loss_scaling": 1.0,
    "accum_type": torch.float32,
    "velocity_accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
    "use_combined_accum": False,
    "max_grad_norm": math.inf,
    "use_tf_variant": False,
    "bias_correction": True,
}


@dataclass(frozen=True, slots=True)
class GroupReading:
    """One parameter group.

    Args:
        parameters: as in the group.
        values: attribute names -> numbers, flags, and the pair `betas`.
        constant: names of the attributes that are compiled in.
    """

    parameters: tuple[Tensor, ...]
    values: Mapping[str, Any]
    constant: frozenset[str]

    @property
    def has_momentum(self) -> bool:
        """Whether there is a momentum tensor: a constant 0 needs none."""
        value = self.values.get("momentum", 0.0)
        return "momentum" in self.values and not ("momentum" in self.constant and value == 0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """An optimizer's values.

    Args:
        kind: sgd, adam, adamw, rmsprop or lamb.
        torch_class: torch's class of the same equations, None for LAMB.
        groups: in the optimizer's order.
        settings: what all groups share, by name: loss_scaling, accumulation types,
            max_grad_norm (infinity: no limit), use_combined_accum, bias_correction, ...
        loss_scaling_is_constant: whether it is compiled in.
    """

    kind: str
    torch_class: type[torch.optim.Optimizer] | None
    groups: tuple[GroupReading, ...]
    settings: Mapping[str, Any]
    loss_scaling_is_constant: bool

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All that may differ between two readings of one optimizer."""
        groups = [(dict(group.values), group.constant) for group in self.groups]
        return groups, dict(self.settings), self.loss_scaling_is_constant


def read_optimizer(
    optimizer: torch.optim.Optimizer, *, automatic_loss_scaling: bool = False
) -> Reading:
    """Read an optimizer and refuse settings that the device cannot follow.

    Args:
        optimizer: of a class that this package knows, or of a subclass of one.
        automatic_loss_scaling: makes the loss scale variable.

    Raises:
        AssertionError: for another class, for attributes that are no plain numbers, or for groups
            of which some are centred.
        ValueError: for amsgrad.
        poptorch.Error: for maximize.
    """
    kind = _kind_of(optimizer)
    ours = optimizer if isinstance(optimizer, Optimizer) else None
    groups = tuple(_read_group(group, kind, ours) for group in optimizer.param_groups)
    require(
        len({group.values.get("centered") for group in groups}) == 1,
        "All parameter groups of an RMSprop optimizer must agree on centered",
    )
    variable = ours is not None and not ours.variable_attrs.isConstant("loss_scaling")
    torch_classes = [known for known in kind.classes if not issubclass(known, Optimizer)]
    return Reading(
        kind=kind.name,
        torch_class=torch_classes[0] if torch_classes else None,
        groups=groups,
        settings={name: getattr(optimizer, name, d) for name, d in _SETTINGS.items()},
        loss_scaling_is_constant=not (variable or automatic_loss_scaling),
    )


def _kind_of(optimizer: torch.optim.Optimizer) -> _Kind:
    for kind in _KINDS:
        if isinstance(optimizer, kind.classes):
            if type(optimizer) not in kind.classes:
                logger.warning(
                    "Poptorch does not run Python optimizer code directly: %s is a subclass of %s, "
                    "whose update runs instead",
                    type(optimizer).__name__,
                    next(c for c in kind.classes if isinstance(optimizer, c)).__name__,
                )
            return kind
    known = ", ".join(f"{c.__module__}.{c.__name__}" for kind in _KINDS for c in kind.classes)
    raise AssertionError(
        f"Unsupported optimizer type. {type(optimizer).__name__} is none of: {known}"
    )


def _read_group(group: Mapping[str, Any], kind: _Kind, ours: Optimizer | None) -> GroupReading:
    if group.get("amsgrad"):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    if group.get("maximize"):
        raise createPoptorchError(
            "maximize=True is not supported: return the negative loss from the model instead",
            id="optimizer",
        )
    values: dict[str, Any] = {}
    for name in kind.numbers:
        if name in group:
            require(_is_number(group[name]), f"{name} must be a number, got {group[name]!r}")
            values[name] = group[name]
    for name in kind.flags:
        values[name] = bool(group[name])
    if "betas" in group:
        betas = group["betas"]
        require(
            isinstance(betas, tuple) and len(betas) == 2 and all(map(_is_number, betas)),
            f"betas must be a tuple of two numbers, got {betas!r}",
        )
        values["betas"] = betas
    constant = frozenset(name for name in values if _is_constant(name, values, kind, ours))
    return GroupReading(tuple(group["params"]), values, constant)


def _is_constant(name: str, values: Mapping[str, Any], kind: _Kind, ours: Optimizer | None) -> bool:
    if ours is not None:
        return ours.variable_attrs.isConstant(name)
    if name == "lr":
        return False
    return name not in kind.neutral or bool(values[name] == kind.neutral[name])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)

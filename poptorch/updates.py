"""Translate optimizers into the core's update rules, with PopTorch's own equations for SGD."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.passes.program.emit_update import AccumulatorDtype
from ipu_dynamo.program import ClipGlobalNorm
from ipu_dynamo.program.ir.update_rules import LAMB, SGD, Adam, RMSprop, Rule
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group
from poptorch.errors import createPoptorchError
from poptorch.optim import GroupReading, Reading

_CLASS_NAMES = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "rmsprop": "RMSProp",
    "lamb": "LAMB",
}
_DESCRIPTIONS = {
    "lr": "learning rates",
    "weight_decay": "weight decays",
    "momentum": "momentums",
    "dampening": "dampenings",
    "velocity_scaling": "velocity scalings",
    "betas": "betas",
    "eps": "eps",
    "alpha": "alphas",
    "max_weight_norm": "max weight norms",
}
_ACCUMULATION_TYPES = (
    "accum_type",
    "velocity_accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
)


def groups_of(reading: Reading, parameters: Mapping[str, Tensor]) -> tuple[Group, ...]:
    """The update of every parameter group.

    Parameters that are not the model's, or need no gradient, are left out.

    Args:
        parameters: the model's, by name; of two names of one tensor the first counts.
    """
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    limit = reading.settings["max_grad_norm"]
    clip = None if math.isinf(limit) else ClipGlobalNorm(float(limit))
    groups = []
    for group in reading.groups:
        rule = _rule(reading, group)
        combined = reading.settings["use_combined_accum"] and group.has_momentum
        accumulator: AccumulatorDtype = "weight" if combined else reading.settings["accum_type"]
        members = [t for t in group.parameters if id(t) in names and t.requires_grad]
        values = _values(rule, group)
        own = tuple(names[id(t)] for t in members)
        groups.append(Group(rule, own, values, clip, accumulator))
    return tuple(groups)


def check_replacement(old: Reading, new: Reading) -> None:
    """Check a new optimizer against the values of the old one that are compiled in.

    Raises:
        poptorch.Error: another kind of update, other groups, another constant value, or a constant
            that became variable or the reverse.
    """
    if _kind(old) != _kind(new):
        raise createPoptorchError(
            f"Can not replace optimizer of type {_kind(old)} with new optimizer of type "
            f"{_kind(new)}. The kind is part of the program: compile with the new kind from the "
            "beginning, or call destroy() on the model first, so that it is compiled again",
            id="optimizer",
        )
    if old.settings["max_grad_norm"] != new.settings["max_grad_norm"]:
        raise createPoptorchError("Clip norm settings do not match.", id="optimizer")
    if len(old.groups) != len(new.groups):
        raise createPoptorchError(
            f"Replacement optimizer has a different number of specific tensors: "
            f"{len(new.groups)} parameter groups instead of {len(old.groups)}",
            id="optimizer",
        )
    for before, after in zip(old.groups, new.groups, strict=True):
        if [id(t) for t in before.parameters] != [id(t) for t in after.parameters]:
            raise createPoptorchError(
                "Replacement optimizer has a different number of specific tensors: parameters "
                "joined, left or changed groups",
                id="optimizer",
            )
        for name in before.values.keys() | after.values.keys():
            same = before.values.get(name) == after.values.get(name)
            constant = (name in before.constant, name in after.constant)
            _check_attribute(_DESCRIPTIONS.get(name, name), constant, same)
    constant = (old.loss_scaling_is_constant, new.loss_scaling_is_constant)
    same = old.settings["loss_scaling"] == new.settings["loss_scaling"]
    _check_attribute("loss scaling", constant, same)


def _check_attribute(what: str, constant: tuple[bool, bool], same: bool) -> None:
    problem = f"Problem with {what}. An attribute that was not given to the constructor is compiled"
    match constant:
        case (True, False):
            raise createPoptorchError(
                f"{problem} in. Can not replace a constant value with a non constant value.",
                id="optimizer",
            )
        case (False, True):
            raise createPoptorchError(
                f"{problem} in. Can not replace a non constant value with a constant value.",
                id="optimizer",
            )
        case (True, True) if not same:
            raise createPoptorchError(
                f"{problem} in. Values are constant but do not match.", id="optimizer"
            )


def _kind(reading: Reading) -> str:
    """The kind of update, which must not change, as text."""
    settings, groups = reading.settings, reading.groups
    details = [
        f"{name}={settings[name]}"
        for name in _ACCUMULATION_TYPES
        if settings[name] != torch.float32
    ]
    if reading.kind == "sgd":
        momentum = any(group.has_momentum for group in groups)
        variant = "Combined" if settings["use_combined_accum"] else "Separate"
        details.insert(0, variant if momentum else "no momentum")
    if reading.kind == "rmsprop":
        details.insert(0, "centered" if groups[0].values["centered"] else "plain")
        details += ["TensorFlow's"] * settings["use_tf_variant"]
    if not settings["bias_correction"]:
        details.append("no bias correction")
    return f"{_CLASS_NAMES.get(reading.kind, reading.kind)}({', '.join(details)})"


def _rule(reading: Reading, group: GroupReading) -> Rule:
    settings: Mapping[str, Any] = reading.settings
    first = settings["first_order_momentum_accum_type"]
    match reading.kind:
        case "sgd":
            combined = settings["use_combined_accum"]
            return SGD(
                momentum=group.has_momentum,
                nesterov=group.has_momentum and group.values["nesterov"],
                dampen_first_step=True,
                stateless_dampening=True,
                momentum_dtype=None if combined else settings["velocity_accum_type"],
            )
        case "adam" | "adamw":
            return Adam(
                decoupled_weight_decay=reading.kind == "adamw",
                exp_avg_dtype=first,
                exp_avg_sq_dtype=settings["second_order_momentum_accum_type"],
            )
        case "rmsprop":
            return RMSprop(
                centered=group.values["centered"],
                momentum=group.has_momentum,
                tensorflow=settings["use_tf_variant"],
                square_avg_dtype=first,
                grad_avg_dtype=first,
                momentum_dtype=torch.float32,
            )
        case "lamb":
            return LAMB(
                uncorrected=not settings["bias_correction"],
                exp_avg_dtype=first,
                exp_avg_sq_dtype=settings["second_order_momentum_accum_type"],
            )
    raise createPoptorchError(
        f"there is no update rule for the optimizer {reading.kind}", id="update"
    )


def _values(rule: Rule, group: GroupReading) -> tuple[float, ...]:
    values = dict(group.values)
    if "betas" in values:
        values["beta1"], values["beta2"] = values["betas"]
    return tuple(float(values.get(name, 0.0)) for name in rule.hyperparameters)

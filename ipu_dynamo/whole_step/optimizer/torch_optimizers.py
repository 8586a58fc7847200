"""Translate torch's optimisers into update rules, and their state from and to checkpoints."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipu_dynamo.errors import CompileError, InputError
from ipu_dynamo.passes.program.emit_update import AccumulatorDtype
from ipu_dynamo.program import Clip, TracedStep
from ipu_dynamo.program.ir.update_rules import SGD, Adam, RMSprop, Rule
from ipu_dynamo.whole_step.optimizer.optimizer_checkpoints import has_step_hooks

States = dict[str, dict[str, Tensor]]  # parameter's name -> state's name -> tensor
_LOSS_SCALE = "loss_scale"  # key of `optimizer.state`, which is no parameter


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of an optimiser.

    Args:
        rule: how its parameters are updated.
        parameters: their names, in the optimiser's order.
        values: the numbers of `rule.hyperparameters`, in that order. They may change without
            compiling again; nothing else may.
        clip: how the gradients of a step are clipped; the same for all groups.
        trace: the functions of a traced rule; the same for all groups.
        accumulator_dtype: in which gradients are summed; `weight`: each in that of its weight;
            None: float32 for weights in half precision, else as `weight`.
        accumulator_dtypes: of single parameters, by name, in place of `accumulator_dtype`.
    """

    rule: Rule
    parameters: tuple[str, ...]
    values: tuple[float, ...]
    clip: Clip | None = None
    accumulator_dtype: AccumulatorDtype = None
    accumulator_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict, hash=False)
    trace: TracedStep | None = field(default=None, compare=False, repr=False)


def describe(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    *,
    treat_as: type[Optimizer] | None = None,
) -> tuple[Group, ...]:
    """Read what `optimizer` does to `parameters`.

    `foreach`, `fused` and `capturable` say how torch computes the step, and change nothing here.
    Parameters that need no gradient are left out, as torch leaves them alone.

    Args:
        parameters: the model's parameters by name; of two names of one tensor the first counts.
        treat_as: a supported class that `optimizer` derives from, whose equations apply and not
            the subclass's own.

    Raises:
        CompileError: the optimiser has no rule, or trains a tensor that is not in `parameters`.
    """
    read = _READERS[_supported_class(optimizer, treat_as)]
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise CompileError(
                f"parameter group {index} asks for a differentiable step",
                hint="construct the optimizer with differentiable=False",
            )
        rule, values = read(group, index)
        members = [
            name_of(tensor, names, index, place)
            for place, tensor in enumerate(group["params"])
            if tensor.requires_grad
        ]
        groups.append(Group(rule, tuple(members), values))
    return tuple(groups)


def refresh(
    groups: tuple[Group, ...],
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    *,
    read: Callable[[Any, Mapping[str, Tensor]], tuple[Group, ...]] = describe,
) -> tuple[Group, ...]:
    """Read the numbers of `groups` again from `optimizer`, the same one or another.

    Args:
        read: what `groups` were read with.

    Raises:
        InputError: the update would have to be compiled again: another class or flag, or
            parameters that joined, left or changed groups.
        CompileError: as `describe`.
    """
    new = read(optimizer, parameters)
    again = "compile the model again with this optimizer"
    if len(new) != len(groups):
        problem = f"the optimizer has {len(new)} parameter groups, the program {len(groups)}"
        raise InputError(problem, hint=again)
    refreshed = []
    for index, (compiled, group) in enumerate(zip(groups, new, strict=True)):
        if moved := sorted(set(compiled.parameters) ^ set(group.parameters)):
            problem = f"parameter group {index} of the optimizer and of the program differ in "
            raise InputError(problem + ", ".join(moved), hint=again)
        rule = _completed(group.rule, compiled.rule)
        if rule != compiled.rule:
            problem = f"parameter group {index} would need the update {rule}"
            raise InputError(f"{problem}, the program has {compiled.rule}", hint=again)
        if group.clip != compiled.clip:
            problem = f"gradients would be clipped by {group.clip}, "
            raise InputError(f"{problem}and the program has {compiled.clip}", hint=again)
        refreshed.append(replace(compiled, values=group.values))
    return tuple(refreshed)


def has_rule(optimizer: Optimizer) -> bool:
    """Whether the core knows the step of an optimiser, without tracing it."""
    return type(optimizer) in _READERS and not has_step_hooks(optimizer)


def import_state(
    groups: tuple[Group, ...], optimizer: Optimizer, parameters: Mapping[str, Tensor]
) -> States:
    """Find the states that `optimizer` already holds, from a checkpoint or steps made before.

    Returns:
        Tensors of the optimiser itself, to be copied from; parameters and states that it has none
        for are absent, and begin with their initial values.

    Raises:
        InputError: a state has another shape than its parameter.
    """
    states: States = {}
    for group in groups:
        for name in group.parameters:
            held = optimizer.state.get(parameters[name]) or {}
            imported = {}
            for spec in group.rule.state_names():
                value = held.get(spec.name)
                if spec.name == "momentum_started":
                    value = None if held.get("momentum_buffer") is None else 1.0
                if value is None:
                    continue
                tensor = torch.as_tensor(
                    value, dtype=None if torch.is_tensor(value) else spec.dtype
                )
                shape = parameters[name].shape if spec.shape == "like_parameter" else torch.Size()
                if tensor.numel() != math.prod(shape):
                    raise InputError(
                        f"state {spec.name} of {name} in the optimizer has shape "
                        f"{list(tensor.shape)}, not {list(shape)}",
                        hint="load the state of an optimizer for this model",
                    )
                imported[spec.name] = tensor.detach().reshape(shape)
            if imported:
                states[name] = imported
    return states


def export_state(
    states: Mapping[str, Mapping[str, Tensor]],
    groups: tuple[Group, ...],
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
) -> None:
    """Write copies of `states` into `optimizer.state`, so that torch could step or save from there.

    Torch wants states in their parameter's dtype and device, except the step counter.
    """
    for group, torch_group in zip(groups, optimizer.param_groups, strict=True):
        on_device = torch_group.get("capturable") or torch_group.get("fused")
        for name in group.parameters:
            own, parameter = states.get(name, {}), parameters[name]
            if not own or ("momentum_started" in own and not own["momentum_started"].item()):
                continue
            written = optimizer.state[parameter]
            for spec in group.rule.state_names():
                if spec.shape == "like_parameter":
                    written[spec.name] = torch.empty_like(parameter, requires_grad=False).copy_(
                        own[spec.name]
                    )
                elif spec.name == "step":
                    device = parameter.device if on_device else "cpu"
                    written["step"] = own["step"].detach().to(device, torch.float32, copy=True)


def import_loss_scale(optimizer: Optimizer) -> dict[str, Tensor]:
    """The states of automatic loss scaling that `optimizer` holds, by name."""
    held: Mapping[Any, dict[str, Tensor]] = optimizer.state
    return dict(held.get(_LOSS_SCALE, {}))


def export_loss_scale(states: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Write copies of the states of automatic loss scaling, if there are any, into
    `optimizer.state`, which also keeps and saves states that belong to no parameter."""
    if states:
        held: dict[Any, Any] = optimizer.state
        held[_LOSS_SCALE] = {name: value.clone() for name, value in states.items()}


def _supported_class(optimizer: Optimizer, treat_as: type[Optimizer] | None) -> type[Optimizer]:
    """The class whose equations apply."""
    kind = type(optimizer) if treat_as is None else treat_as
    supported = ", ".join(f"torch.optim.{known.__name__}" for known in _READERS)
    if kind not in _READERS or not isinstance(optimizer, kind):
        base = next((known for known in _READERS if isinstance(optimizer, known)), None)
        if base is not None:
            problem = f"{_full_name(optimizer)} may change what {_full_name(base)} computes"
            raise CompileError(problem, hint=f"use one of {supported} itself")
        problem = f"there is no update rule for the optimizer {_full_name(optimizer)}"
        raise CompileError(problem, hint=f"use one of {supported}")
    if has_step_hooks(optimizer):
        raise CompileError(
            f"{_full_name(optimizer)} has step hooks, which a compiled step would not run",
            hint="remove them, and do their work around the call of the compiled model",
        )
    return kind


def name_of(tensor: Tensor, names: Mapping[int, str], group: int, place: int) -> str:
    """The model's name of a trained tensor that a rule can update."""
    which = f"parameter {place} of the optimizer's group {group}"
    if id(tensor) not in names:
        raise CompileError(
            f"{which}, of shape {list(tensor.shape)}, is not a parameter of the model",
            hint="construct the optimizer from the parameters of the model that is compiled",
        )
    name = names[id(tensor)]
    if not tensor.dtype.is_floating_point:
        raise CompileError(
            f"{which}, {name}, is {str(tensor.dtype).removeprefix('torch.')}",
            hint="train floating-point parameters, complex numbers as pairs of them",
        )
    return name


def _completed(rule: Rule, compiled: Rule) -> Rule:
    """`rule`, with the choices that a torch optimiser does not make as in `compiled`.

    These are the flags and dtypes that torch optimisers do not have, and whether there is a
    momentum tensor. A compiled momentum can become 0, so that it is not used, but not the reverse.
    """
    match rule, compiled:
        case SGD(), SGD():
            momentum = rule.momentum or compiled.momentum
            return replace(
                compiled,
                momentum=momentum,
                nesterov=rule.nesterov if rule.momentum else momentum and compiled.nesterov,
                maximize=rule.maximize,
            )
        case Adam(), Adam():
            return replace(
                compiled,
                decoupled_weight_decay=rule.decoupled_weight_decay,
                amsgrad=rule.amsgrad,
                maximize=rule.maximize,
            )
        case RMSprop(), RMSprop():
            return replace(
                compiled,
                centered=rule.centered,
                momentum=rule.momentum or compiled.momentum,
                maximize=rule.maximize,
            )
    return rule


def _read_sgd(group: Mapping[str, Any], index: int) -> tuple[Rule, tuple[float, ...]]:
    values = _numbers(group, index, SGD.hyperparameters)
    momentum = values[SGD.hyperparameters.index("momentum")] != 0.0
    nesterov = momentum and bool(group["nesterov"])
    return SGD(momentum=momentum, nesterov=nesterov, maximize=bool(group["maximize"])), values


def _read_adam(group: Mapping[str, Any], index: int) -> tuple[Rule, tuple[float, ...]]:
    beta1, beta2 = group["betas"]
    values = _numbers({**group, "beta1": beta1, "beta2": beta2}, index, Adam.hyperparameters)
    rule = Adam(
        decoupled_weight_decay=bool(group["decoupled_weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
    )
    return rule, values


def _read_rmsprop(group: Mapping[str, Any], index: int) -> tuple[Rule, tuple[float, ...]]:
    values = _numbers(group, index, RMSprop.hyperparameters)
    rule = RMSprop(
        centered=bool(group["centered"]),
        momentum=values[RMSprop.hyperparameters.index("momentum")] > 0.0,
        maximize=bool(group["maximize"]),
    )
    return rule, values


def _numbers(group: Mapping[str, Any], index: int, names: tuple[str, ...]) -> tuple[float, ...]:
    """The named entries as Python floats; a tensor of one element is read."""
    values = []
    for name in names:
        value = group[name]
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CompileError(
                f"{name} of the optimizer's group {index} is not a number: {value!r}",
                hint="give a Python number or a tensor of one element that needs no gradient",
            )
        values.append(float(value))
    return tuple(values)


def _full_name(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    module = kind.__module__
    module = "torch.optim" if module.startswith("torch.optim.") else module
    return f"{module}.{kind.__qualname__}"


_Reader = Callable[[Mapping[str, Any], int], tuple[Rule, tuple[float, ...]]]
_READERS: dict[type[Optimizer], _Reader] = {  # AdamW derives from Adam: the nearest base first
    torch.optim.SGD: _read_sgd,
    torch.optim.AdamW: _read_adam,
    torch.optim.Adam: _read_adam,
    torch.optim.RMSprop: _read_rmsprop,
}

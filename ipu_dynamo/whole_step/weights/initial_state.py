"""Make the tensors that a program's variables begin with."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ipu_dynamo.errors import InputError
from ipu_dynamo.ops.precision.narrowing import tell_of_lost_values
from ipu_dynamo.program import (
    AdjustLossScale,
    JointUpdate,
    Program,
    TensorType,
    Update,
    UpdateFactors,
    Variable,
)
from ipu_dynamo.program.ir.made_names import parameter_of
from ipu_dynamo.runtime.update.rows import gains_in_a_row, zeros_in_a_row
from ipu_dynamo.whole_step.compile_model import Compiled
from ipu_dynamo.whole_step.optimizer.torch_optimizers import States


def initial_tensors(
    compiled: Compiled,
    known: States,
    *,
    private: bool,
    loss_scale: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """A tensor for every variable of a program; a grouped one has a leading dimension over groups.

    Args:
        known: optimiser states that exist already; others begin with their rule's first value.
        private: copies of the model's tensors, and not these themselves.
        loss_scale: states of automatic loss scaling that exist already.
    """
    held: dict[str, Tensor] = new_accumulators(compiled)
    for variable in compiled.program.variables:
        device = compiled.devices[variable.ipu]
        if variable.name in compiled.tensors:
            tensor = compiled.tensors[variable.name].detach()
            copied = private or variable.kind == "constant"
            if copied or tensor.dtype != variable.type.dtype:
                own = tensor.to(device, variable.type.dtype, copy=True)
                tell_of_lost_values(f"{variable.kind} {variable.name}", tensor.to(device), own)
                tensor = own
            held[variable.name] = tensor
        elif variable.kind == "loss_scale":
            first = compiled.loss_scale if variable.type.dtype.is_floating_point else 0
            held[variable.name] = torch.full((), first, dtype=variable.type.dtype, device=device)
    for state, name in loss_scale_states(compiled.program).items():
        if loss_scale and state in loss_scale:
            held[name].copy_(loss_scale[state])
    return held | _states(compiled.program, known, held)


def new_accumulators(compiled: Compiled) -> dict[str, Tensor]:
    """Zeros for the IPUs that run here, laid out as the parameters whose gradients are summed."""
    variables = compiled.host.runs.variables
    grouped = {variable.name for variable in variables if variable.groups}
    accumulators = {}
    for variable in variables:
        if variable.kind != "accumulator":
            continue
        parameter = parameter_of(variable.name)
        like = compiled.tensors.get(parameter)
        if like is None:
            like = torch.empty(variable.type.shape, device="meta")
        elif parameter in grouped:
            like = like[0]
        accumulators[variable.name] = torch.zeros_like(
            like, dtype=variable.type.dtype, device=compiled.devices[variable.ipu]
        )
    for update in updates(compiled.program):
        if update.function is not None:
            names = [name for name in update.gradients if name in accumulators]
            own = [accumulators[name] for name in names]
            beside = _small_in_a_row(own, [TensorType.of(tensor) for tensor in own])
            accumulators |= {names[place]: zeros for place, zeros in beside.items()}
    return accumulators


def fresh_seed(program: Program) -> int:
    """A seed from torch's generator, for a program that draws random numbers."""
    draws = any(stream.source == "random" for stream in program.inputs)
    return int(torch.randint(2**62, ()).item()) if draws else 0


def loss_scale_variable(program: Program) -> str | None:
    """The variable that is the factor on the loss, if there is one."""
    held = [v.name for v in program.variables if v.kind == "loss_scale"]
    return held[0] if held else None


def loss_scale_states(program: Program) -> dict[str, str]:
    """The variables of automatic loss scaling by their roles: "scale", "steps", "so_far"."""
    for instruction in program.walk():
        if isinstance(instruction, AdjustLossScale):
            names = {"steps": instruction.steps, "so_far": instruction.so_far}
            own = {state: name for state, name in names.items() if name is not None}
            return {"scale": instruction.scale, **own}
    return {}


def updates(program: Program) -> list[Update]:
    """The optimiser's instructions, in order."""
    return [i for i in program.walk() if isinstance(i, Update)]


def _states(program: Program, known: States, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    variables = {variable.name: variable for variable in program.variables}
    _refuse_unequal_counts(program, known)
    states: dict[str, Tensor] = {}
    for instruction in program.walk():
        if isinstance(instruction, UpdateFactors):
            for name in instruction.counters:
                states[name] = torch.zeros((), dtype=variables[name].type.dtype)
                states[name].copy_(known.get("", {}).get(name, states[name]))
        elif isinstance(instruction, JointUpdate):
            for name in instruction.written:
                type_ = variables[name].type
                states[name] = torch.zeros(type_.shape, dtype=type_.dtype)
                states[name].copy_(known.get("", {}).get(name, states[name]))
    for update in updates(program):
        _add_states(states, update, variables, known, held)
    return states


def _add_states(
    states: dict[str, Tensor],
    update: Update,
    variables: Mapping[str, Variable],
    known: States,
    held: Mapping[str, Tensor],
) -> None:
    """Add the states of an update that are not there yet.

    A rule gives their first values. Those of a traced update begin at zero: its first step makes
    them. States of one name are one tensor.
    """
    by_rule = update.function is None
    initial = {spec.name: spec.initial for spec in update.rule.state_names()} if by_rule else {}
    likes = [held[parameter] for parameter in update.parameters]
    for state, names in update.states:
        beside = {} if by_rule else _small_in_a_row(likes, [variables[name].type for name in names])
        for place, (parameter, name) in enumerate(zip(update.parameters, names, strict=True)):
            like, of, variable = likes[place], variables[parameter], variables[name]
            type_, first = variable.type, initial.get(state, 0.0)
            if name not in states:
                if place in beside:
                    states[name] = beside[place]
                elif (type_.shape, variable.groups) == (of.type.shape, of.groups):
                    states[name] = torch.full_like(
                        like, first, dtype=type_.dtype, requires_grad=False
                    )
                else:
                    states[name] = torch.full(
                        type_.shape, first, dtype=type_.dtype, device=like.device
                    )
            if state in known.get(parameter, {}):
                states[name].copy_(known[parameter][state])


def _small_in_a_row(likes: Sequence[Tensor], types: Sequence[TensorType]) -> dict[int, Tensor]:
    """Zeros for small dense parameters, by place, where the update of all of them reads a row."""
    rows: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, (like, type_) in enumerate(zip(likes, types, strict=True)):
        fits = type_.shape == tuple(like.shape) and like.is_contiguous()
        if fits and like.numel() and gains_in_a_row(like):
            rows.setdefault((type_.dtype, like.device), []).append(place)
    return {
        place: zeros
        for (dtype, _), places in rows.items()
        for place, zeros in zip(
            places, zeros_in_a_row([likes[i] for i in places], dtype), strict=True
        )
    }


def _refuse_unequal_counts(program: Program, known: States) -> None:
    """Raise when parameters that share a step counter come with different counts.

    Raises:
        InputError: some parameters have made more steps than others of their update.
    """
    for update in updates(program):
        if update.function is not None:
            continue
        for spec in update.rule.state_names():
            if spec.shape != "scalar" or update.rule.kind == "rmsprop":
                continue  # torch counts RMSprop's steps, too, but no equation reads the count
            counts = {
                name: float(known.get(name, {}).get(spec.name, torch.tensor(spec.initial)))
                for name in update.parameters
            }
            if len(set(counts.values())) > 1:
                least, *_, most = sorted(counts, key=counts.__getitem__)
                raise InputError(
                    f"the optimizer's state {spec.name} is {counts[most]:g} for {most} and "
                    f"{counts[least]:g} for {least}, which are updated together",
                    hint="put those with fewer steps into a parameter group of their own",
                )

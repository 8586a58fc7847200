"""Write the end of a step: sums over replicas, updates, and the optimiser's states.

Before   a program that leaves gradients in accumulators of their weights' types
After    accumulators in the types in which the optimiser sums; behind the micro-batches copies of
         gradients to the owners of their parameters, copies of a variable loss scale to the IPUs
         that update, sums over replicas, and updates; states are variables
Keeps    the order of parameters in each group. The updates of a traced step are written by
         `EmitTracedUpdate`, in the same frame.
Source   PopTorch user guide, "Gradient accumulation" and the reduction options.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from ipu_dynamo.capture.capture import LOSS_SCALE
from ipu_dynamo.options import Options
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import (
    AllReduce,
    Clip,
    Copy,
    Program,
    ReplicaGroups,
    TensorType,
    TracedStep,
    Update,
    Variable,
)
from ipu_dynamo.program.ir import made_names
from ipu_dynamo.program.ir.instructions import Plain
from ipu_dynamo.program.ir.made_names import accumulator, on_ipu
from ipu_dynamo.program.ir.update_rules import Rule, StateSpec
from ipu_dynamo.program.schedule.sections import sections, with_sections

# Of sums of gradients: `weight` is that of each weight; None is float32 for weights in half
# precision, and else as `weight`.
AccumulatorDtype = torch.dtype | Literal["weight"] | None


class UpdateGroup(Protocol):
    """A parameter group of an optimiser, as far as a program names it."""

    @property
    def rule(self) -> Rule: ...

    @property
    def parameters(self) -> tuple[str, ...]: ...

    @property
    def clip(self) -> Clip | None:
        """How the gradients of a step are clipped; the same for all groups."""

    @property
    def accumulator_dtype(self) -> AccumulatorDtype:
        """In which dtype gradients are summed."""

    @property
    def accumulator_dtypes(self) -> Mapping[str, torch.dtype]:
        """The same of single parameters, by name."""

    @property
    def trace(self) -> TracedStep | None:
        """Of a traced rule, the functions; the same for all groups."""


class UpdateForm(Protocol):
    """The updates of a step by rules, or by the functions of a trace."""

    def variables(self) -> Sequence[Variable]:
        """The states of trained parameters, and variables that belong to no parameter."""

    def split(self, update: Update) -> Sequence[Update]:
        """The updates of parameters that have a group and an IPU in common."""

    def copies(self, updates: Sequence[Update]) -> Sequence[Plain]:
        """Copies of numbers that are known before the step."""

    def rounds(self, updates: Sequence[Update]) -> Sequence[Plain]:
        """The instructions by which parameters depend on each other, after all sums."""


class EmitUpdate(Pass):
    """The pass. `groups` are of the optimiser; one that is traced is left to another pass."""

    level = "program"
    needed = "nothing would be trained"

    options: Options
    groups: Sequence[UpdateGroup] = ()

    def applies(self, program: Program, contents: Contents) -> bool:
        return not any(group.trace for group in self.groups)

    def __call__(self, program: Program) -> Program:
        if program.kind != "training" or any(group.trace for group in self.groups):
            return program
        return with_updates(
            program, self.options, self.groups, _Rules(program, self.options, self.groups)
        )


def with_updates(
    program: Program, options: Options, groups: Sequence[UpdateGroup], form: UpdateForm
) -> Program:
    """Write the end of a step, in which updates have this form."""
    summed = _summed_as(program, options, groups)
    variables = [
        replace(v, type=summed.get(v.name, v.type)) if v.kind == "accumulator" else v
        for v in program.variables
    ]
    known = {variable.name: variable for variable in variables}
    local: dict[str, str] = {}  # the name of a parameter's gradient on its owner
    copies: list[Plain] = []
    for parameter in trained(program):
        total, owner = known[accumulator(parameter.name)], parameter.ipu
        local[parameter.name] = total.name
        if total.ipu != owner:
            local[parameter.name] = on_ipu(total.name, owner)
            why = f"gradient of {parameter.name}"
            copies.append(
                Copy(total.name, local[parameter.name], total.type, total.ipu, owner, why)
            )
    named = {name for group in groups for name in group.parameters}
    ipus = sorted({known[name].ipu for name in named & local.keys()})
    scale = next((v for v in variables if v.name == LOSS_SCALE), None)
    if scale is not None:
        copies += [
            Copy(scale.name, on_ipu(scale.name, ipu), scale.type, scale.ipu, ipu, "the loss scale")
            for ipu in ipus
            if ipu != scale.ipu
        ]
    updates = [
        update
        for bare in _bare_updates(known, options, groups, local, scale)
        for update in form.split(bare)
    ]
    copies += form.copies(updates)
    sums = [list(_sums(update, known, options.replicas)) for update in updates]
    rounds = form.rounds(updates)
    end: list[Plain] = []
    if rounds:  # they need the gradients of all
        end += (total for of in sums for total in of)
        end += [*rounds, *updates]
    else:
        for of, update in zip(sums, updates, strict=True):
            end += [*of, update]
    made = replace(program, variables=(*variables, *form.variables()))
    return with_sections(made, after=[*copies, *end, *sections(program).after])


def trained(program: Program) -> list[Variable]:
    """The parameters with a gradient, in the order of their accumulators."""
    parameters = {accumulator(v.name): v for v in program.variables if v.kind == "parameter"}
    return [parameters[v.name] for v in program.variables if v.name in parameters]


def _summed_as(
    program: Program, options: Options, groups: Sequence[UpdateGroup]
) -> dict[str, TensorType]:
    """The types of accumulators by name. Where nothing is summed, it is the weight's."""
    wanted: dict[str, AccumulatorDtype] = {
        name: group.accumulator_dtypes.get(name, group.accumulator_dtype)
        for group in groups
        for name in group.parameters
    }
    several = options.gradient_accumulation * options.replicas > 1
    found = {}
    for parameter in trained(program):
        type_, dtype = parameter.type, wanted.get(parameter.name)
        if dtype is None and type_.dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        if several and isinstance(dtype, torch.dtype):
            type_ = replace(type_, dtype=dtype)
        found[accumulator(parameter.name)] = type_
    return found


def _bare_updates(
    known: Mapping[str, Variable],
    options: Options,
    groups: Sequence[UpdateGroup],
    local: Mapping[str, str],
    scale: Variable | None,
) -> Iterator[Update]:
    """An update for each group and IPU, still without states.

    Args:
        local: the name of each parameter's gradient on its owner.
        scale: a variable loss scale.
    """
    clear, divisor = options.gradient_accumulation > 1, _divisor(options)
    for index, group in enumerate(groups):
        names = [name for name in group.parameters if name in local]
        for ipu in sorted({known[name].ipu for name in names}):
            own = tuple(name for name in names if known[name].ipu == ipu)
            gradients = tuple(local[name] for name in own)
            update = Update(group.rule, index, ipu, own, gradients, (), divisor, clear)
            if scale is not None:
                local_scale = scale.name if ipu == scale.ipu else on_ipu(scale.name, ipu)
                update = replace(update, loss_scale=local_scale)
            halves = any(known[name].type.dtype == torch.float16 for name in own)
            if options.stochastic_rounding and halves:
                update = replace(update, rounding="stochastic")
            yield update


def _sums(update: Update, known: Mapping[str, Variable], replicas: int) -> Iterator[AllReduce]:
    """The sums over the replicas that share a parameter, if several do."""
    sharing: dict[ReplicaGroups | None, list[str]] = {}
    for name, gradient in zip(update.parameters, update.gradients, strict=True):
        sharing.setdefault(known[name].groups, []).append(gradient)
    for groups, gradients in sharing.items():
        if (replicas if groups is None else groups.size) > 1:
            yield AllReduce(tuple(gradients), update.ipu, groups=groups)


@dataclass(frozen=True)
class _Rules:
    """Updates by rules, an `UpdateForm`."""

    program: Program
    options: Options
    groups: Sequence[UpdateGroup]

    def variables(self) -> list[Variable]:
        """The states."""
        found: dict[str, Variable] = {}
        parameters = {parameter.name: parameter for parameter in trained(self.program)}
        for index, group in enumerate(self.groups):
            for name in group.parameters:
                if name in parameters:
                    for spec in group.rule.state_names():
                        state = _state(index, parameters[name], spec)
                        found.setdefault(state.name, state)
        return list(found.values())

    def split(self, update: Update) -> list[Update]:
        """An update with its states."""
        names, group, ipu = update.parameters, update.group, update.ipu
        states = tuple(
            (spec.name, tuple(_state_name(group, ipu, name, spec) for name in names))
            for spec in update.rule.state_names()
        )
        return [replace(update, states=states)]

    def copies(self, updates: Sequence[Update]) -> list[Plain]:
        """None: hyperparameters are on the host."""
        return []

    def rounds(self, updates: Sequence[Update]) -> list[Plain]:
        """None: each parameter is by itself."""
        return []


def _state(group: int, parameter: Variable, spec: StateSpec) -> Variable:
    groups = parameter.groups if spec.shape != "scalar" else None
    name = _state_name(group, parameter.ipu, parameter.name, spec)
    return Variable(name, spec.type_for(parameter.type), "state", parameter.ipu, groups=groups)


def _state_name(group: int, ipu: int, parameter: str, spec: StateSpec) -> str:
    """The variable that holds a state; parameters that step together share a scalar one."""
    if spec.shape == "scalar":
        return made_names.alone(f"group{group}.ipu{ipu}.{spec.name}")
    return made_names.state(parameter, spec.name)


def _divisor(options: Options) -> float:
    """The divisor of summed gradients; an int without a loss scale."""
    parts = {
        "post": options.gradient_accumulation * options.replicas,
        "running": options.replicas,
        "post_and_loss": options.gradient_accumulation,
    }
    count = parts[options.mean_strategy] if options.reduction == "mean" else 1
    fixed = 1.0 if options.has_variable_loss_scale else options.loss_scale
    return count if fixed == 1.0 else count * fixed

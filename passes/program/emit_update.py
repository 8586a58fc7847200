"""Write what follows the micro-batches of a step, and the variables that only this needs.

Before   parts that write gradients to accumulators, and the optimiser's groups
After    copies of gradients to the owners of their parameters, sums over replicas, in shards
         where a parameter is updated in shards, clipping, updates;
         accumulators and optimiser states as variables
Keeps    the order of parameters in each group.
Source   PopTorch user guide, "Gradient accumulation" and the reduction options.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch

from ipu_dynamo.options import Options
from ipu_dynamo.passes.levels import Part
from ipu_dynamo.passes.program.emit_clipping import clipping
from ipu_dynamo.passes.program.emit_loss_scale import LossScaleEnd
from ipu_dynamo.passes.program.emit_traced import TracedEnd, WithoutGradient
from ipu_dynamo.passes.program.offload_variables import Located, in_shards
from ipu_dynamo.program import (
    AllReduce,
    Clip,
    Copy,
    Instruction,
    ReduceScatter,
    ReplicaGroups,
    TensorType,
    TracedStep,
    Update,
    Variable,
)
from ipu_dynamo.program.ir import made_names
from ipu_dynamo.program.ir.made_names import accumulator, on_ipu
from ipu_dynamo.program.ir.update_rules import Rule, StateSpec

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


@dataclass(frozen=True)
class StepEnd:
    """The end of a step.

    Args:
        parts: of the graph; they say which parameters have gradients, and where these are made.
        groups: of the optimiser.
        owners, types, strides: IPU, type and layout of every parameter.
        loss_scale: the factor on the loss, if it is a variable.
    """

    parts: Sequence[Part]
    options: Options
    groups: Sequence[UpdateGroup]
    owners: Mapping[str, int]
    types: Mapping[str, TensorType]
    strides: Mapping[str, tuple[int, ...] | None]
    loss_scale: LossScaleEnd | None = None

    def instructions(self, located: Located) -> list[Instruction]:
        """All of it but loads, stores and gathers; `located` are the program's variables."""
        result: list[Instruction] = []
        local: dict[str, str] = {}  # what the owner of a parameter calls its gradient
        for part in self.parts:
            for name in part.gradients:
                if name in local:
                    continue  # several functions of a stage add to it
                local[name], owner = accumulator(name), self.owners[name]
                if part.ipu != owner:
                    local[name] = on_ipu(accumulator(name), owner)
                    why = f"gradient of {name}"
                    type_ = self.summed_as[name]
                    copy = Copy(accumulator(name), local[name], type_, part.ipu, owner, why)
                    result.append(copy)
        scale = self.loss_scale
        if scale is not None:
            updated = {name for group in self.groups for name in group.parameters}
            result += scale.copies(sorted({self.owners[name] for name in updated & local.keys()}))
        updates: list[Update] = []
        end = _end_of_updates(self)
        for index, group in enumerate(self.groups):
            trained = [name for name in group.parameters if name in local]
            for ipu in sorted({self.owners[name] for name in trained}):
                names = tuple(name for name in trained if self.owners[name] == ipu)
                gradients = tuple(local[name] for name in names)
                update = self._update(index, group, names, gradients, ipu)
                updates += end.split(update, located)
        result += end.copies(updates)
        result += self._summed_and_clipped(updates, located, end)
        return result if scale is None else result + scale.adjustment()

    def variables(self) -> list[Variable]:
        """The accumulators and the optimiser's states."""
        found = {}
        for part in self.parts:
            for name in part.gradients:
                alone = self.options.replicas == 1
                total = accumulator(name)
                found[total] = Variable(
                    total,
                    self.summed_as[name],
                    "accumulator",
                    part.ipu,
                    alone,
                    strides=self.strides[name],
                )
        if self.loss_scale is not None:
            found |= {variable.name: variable for variable in self.loss_scale.variables()}
        trained = {name for part in self.parts for name in part.gradients}
        return [*found.values(), *_end_of_updates(self).variables(trained)]

    @cached_property
    def summed_as(self) -> Mapping[str, TensorType]:
        """The types of accumulators, by parameter. Where nothing is summed, it is the weight's."""
        wanted: dict[str, AccumulatorDtype] = {
            name: group.accumulator_dtypes.get(name, group.accumulator_dtype)
            for group in self.groups
            for name in group.parameters
        }
        several = self.options.gradient_accumulation * self.options.replicas > 1
        found = {}
        for name, type_ in self.types.items():
            dtype = wanted.get(name)
            if dtype is None and type_.dtype in (torch.float16, torch.bfloat16):
                dtype = torch.float32
            if several and isinstance(dtype, torch.dtype):
                type_ = replace(type_, dtype=dtype)
            found[name] = type_
        return found

    def _summed_and_clipped(
        self, updates: Sequence[Update], located: Located, end: "TracedEnd | _RuleEnd"
    ) -> list[Instruction]:
        """Updates, each behind its sums over replicas; where a norm is clipped, or parameters are
        updated by each other's gradients, behind all."""
        gradients: dict[int, dict[str, str]] = {}
        types: dict[str, TensorType] = {}
        for update in updates:
            own = dict(zip(update.parameters, update.gradients, strict=True))
            gradients.setdefault(update.ipu, {}).update(own)
            types |= {gradient: self.summed_as[name] for name, gradient in own.items()}
        scales = {u.ipu: u.loss_scale for u in updates if u.loss_scale is not None}
        rule = next((group.clip for group in self.groups), None)
        clip = clipping(rule, gradients, types, _divisor(self.options), scales)
        sums = [self._sums(update, located) for update in updates]
        clipped = [replace(update, clip=clip.factor.get(update.ipu)) for update in updates]
        rounds = end.rounds(clipped)
        if not clip.instructions and not rounds:
            return [i for of, update in zip(sums, updates, strict=True) for i in (*of, update)]
        return [*(i for of in sums for i in of), *clip.instructions, *rounds, *clipped]

    def _sums(self, update: Update, located: Located) -> list[Instruction]:
        """The sums over the replicas that share a parameter, if several do: whole or in shards."""
        sharing: dict[tuple[ReplicaGroups | None, bool], list[tuple[str, TensorType]]] = {}
        for name, gradient in zip(update.parameters, update.gradients, strict=True):
            key = located[name].groups, name in update.sharded
            sharing.setdefault(key, []).append((gradient, self.summed_as[name]))
        sums: list[Instruction] = []
        for (groups, sharded), summed in sharing.items():
            values, types = zip(*summed, strict=True)
            count = self.options.replicas if groups is None else groups.size
            if sharded:
                sums.append(ReduceScatter(values, types, count, update.ipu, groups))
            elif count > 1:
                sums.append(AllReduce(values, update.ipu, groups=groups))
        return sums

    def _update(
        self,
        index: int,
        group: UpdateGroup,
        names: tuple[str, ...],
        gradients: tuple[str, ...],
        ipu: int,
    ) -> Update:
        clear, divisor = self.options.gradient_accumulation > 1, _divisor(self.options)
        update = Update(group.rule, index, ipu, names, gradients, (), divisor, clear)
        if self.loss_scale is not None:
            update = replace(update, loss_scale=self.loss_scale.on(ipu))
        halves = any(self.types[name].dtype == torch.float16 for name in names)
        if self.options.stochastic_rounding and halves:
            update = replace(update, rounding="stochastic")
        return update


@dataclass(frozen=True)
class _RuleEnd:
    """The part of a step's end that updates by rules need, with the methods of `TracedEnd`."""

    end: StepEnd

    def variables(self, trained: Collection[str]) -> list[Variable]:
        """The states."""
        found: dict[str, Variable] = {}
        for index, group in enumerate(self.end.groups):
            for name in group.parameters:
                if name in trained:
                    for spec in group.rule.state_names():
                        state = self._state(index, name, spec)
                        found.setdefault(state.name, state)
        return list(found.values())

    def split(self, update: Update, located: Located) -> list[Update]:
        """An update with its states."""
        names, group, ipu = update.parameters, update.group, update.ipu
        states = tuple(
            (spec.name, tuple(_state_name(group, ipu, name, spec) for name in names))
            for spec in update.rule.state_names()
        )
        return [in_shards(replace(update, states=states), located)]

    def copies(self, updates: Sequence[Update]) -> list[Instruction]:
        """None: hyperparameters are on the host."""
        return []

    def rounds(self, updates: Sequence[Update]) -> list[Instruction]:
        """None: each parameter is by itself."""
        return []

    def _state(self, index: int, parameter: str, spec: StateSpec) -> Variable:
        end = self.end
        ipu, type_ = end.owners[parameter], end.types[parameter]
        groups = end.options.replica_groups.get(parameter) if spec.shape != "scalar" else None
        name = _state_name(index, ipu, parameter, spec)
        return Variable(name, spec.type_for(type_), "state", ipu, groups=groups)


def _end_of_updates(end: StepEnd) -> TracedEnd | _RuleEnd:
    """The part of a step's end that its updates need."""
    return emit_traced(end) or _RuleEnd(end)


def emit_traced(end: StepEnd) -> TracedEnd | None:
    """What the end of a step has to do for a traced update, if it is one.

    Raises:
        WithoutGradient: it takes the gradients of all its parameters together, and some have none.
    """
    trace = next((group.trace for group in end.groups), None)
    trained = [n for part in end.parts for n in part.gradients]
    if trace is None or not trained:
        return None
    without = sorted(trace.functions.keys() - {*trained})
    if trace.rounds and without:
        raise WithoutGradient(without)
    return TracedEnd(trace, end.groups, {n: end.owners[n] for n in trained}, end.options)


def _state_name(group: int, ipu: int, parameter: str, spec: StateSpec) -> str:
    """The variable that holds a state; parameters that step together share a scalar one."""
    if spec.shape == "scalar":
        return made_names.alone(f"group{group}.ipu{ipu}.{spec.name}")
    return made_names.state(parameter, spec.name)


def _divisor(options: Options) -> float:
    """What the summed gradients are divided by before the update; an int without a loss scale."""
    parts = {
        "post": options.gradient_accumulation * options.replicas,
        "running": options.replicas,
        "post_and_loss": options.gradient_accumulation,
    }
    count = parts[options.mean_strategy] if options.reduction == "mean" else 1
    fixed = 1.0 if options.has_variable_loss_scale else options.loss_scale
    return count if fixed == 1.0 else count * fixed

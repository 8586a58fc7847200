"""Check conditions outside of the descriptions of instructions: signatures, shards, norms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.collectives import Collective
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.instructions import AllGather, AllReduce, Call, ReduceScatter
from ipu_dynamo.program.ir.rank_streams import ReceiveFromRank, SendToRank
from ipu_dynamo.program.ir.update_instructions import (
    JointUpdate,
    Update,
    UpdateFactors,
    UpdatePart,
)
from ipu_dynamo.program.ir.verify.coupled import check_factors, check_joint, check_part
from ipu_dynamo.program.ir.verify.residence import Residence, same
from ipu_dynamo.program.ir.verify.shape import sharing
from ipu_dynamo.program.ir.verify.update import check_update

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True)
class Scope:
    """The surroundings of the instruction that is checked.

    Args:
        has: the places of values.
        functions, update_functions: of the program, by name.
        updated: the parameters that were updated so far.
    """

    program: "Program"
    has: Residence
    functions: Mapping[str, Function]
    update_functions: Mapping[str, Function]
    updated: set[str] = field(default_factory=set)


def check_conditions(instruction: object, scope: Scope) -> None:
    """Check the conditions of one kind of instruction.

    Raises:
        ValueError: a condition does not hold.
    """
    if condition := _CONDITIONS.get(type(instruction)):
        condition(instruction, scope)


def _call(call: Call, scope: Scope) -> None:
    function, has = scope.functions.get(call.function), scope.has
    if function is None:
        raise ValueError(f"no function is called {call.function}")
    has.check_ipu(call.ipu)
    _number("arguments", len(call.arguments), len(function.inputs))
    _number("results", len(call.results), len(function.outputs))
    for name, expected in zip(call.arguments, function.inputs, strict=True):
        same(name, has.at(name, call.ipu), expected)
    for result, type_ in zip(call.results, function.outputs, strict=True):
        if (result is None) != (type_ is None):
            raise ValueError(f"%{result} is called what @{call.function} returns as {type_}")
        if result is not None and type_ is not None:
            has.define(result, call.ipu, type_, call)
    for name in call.arguments:
        if (variable := has.variables.get(name)) is not None and variable.kind == "parameter":
            has.fetched.discard((name, call.ipu))
            has.whole.discard((name, call.ipu))


def _gather(gather: AllGather, scope: Scope) -> None:
    has, name = scope.has, gather.value
    variable = has.variable(name)
    if variable.groups != gather.groups:
        raise ValueError(f"%{name} is for each {variable.groups or 'replica'}")
    _number("shards", gather.shards, sharing(gather.groups, scope.program.replicas))
    if variable.shards == 1 and name not in has.stale:
        raise ValueError(f"each replica has the whole of %{name}")
    has.stale.discard(name)
    has.whole.add((name, gather.ipu))


def _scatter(scatter: ReduceScatter, scope: Scope) -> None:
    _sum(scatter, scope)
    _number("types", len(scatter.types), len(scatter.values))
    for name, expected in zip(scatter.values, scatter.types, strict=True):
        same(name, scope.has.at(name, scatter.ipu, shard=True), expected)
    _number("shards", scatter.shards, sharing(scatter.groups, scope.program.replicas))


def _sum(total: ReduceScatter | AllReduce, scope: Scope) -> None:
    sharing(total.groups, scope.program.replicas)
    if len(set(total.values)) < len(total.values):
        raise ValueError("a value is summed twice")


def _exchange(collective: Collective, scope: Scope) -> None:
    size = sharing(collective.groups, scope.program.replicas)
    _number("members", collective.members, size)
    if collective.value in scope.has.variables:
        raise ValueError(f"%{collective.value} is a variable, no value of a micro-batch")
    if collective.kind == "all_reduce" and collective.type.dtype == torch.bool:
        raise ValueError(f"%{collective.value} has truth values, which have no sum")
    shape = collective.type.shape
    if collective.kind == "all_to_all" and (not shape or shape[0] % size):
        raise ValueError(f"{collective.type} cannot be divided between {size} replicas")


def _norm(norm: GradientNorm, scope: Scope) -> None:
    if not norm.norm_type > 0:
        raise ValueError(f"there is no {norm.norm_type:g}-norm")
    _gradients(norm, scope)
    _scalar(norm)


def _factor(factor: ClipFactor, _: Scope) -> None:
    if not factor.norms:
        raise ValueError("there is no norm to clip by")
    _scalar(factor)


def _gradients(clip: GradientNorm | ClipValues, scope: Scope) -> None:
    if clip.divisor == 0:
        raise ValueError("gradients are divided by 0")
    for name, gradient in zip(clip.parameters, clip.gradients, strict=True):
        shape = scope.has.variable(name).type.shape
        if scope.has.at(gradient, clip.ipu, shard=True).shape != shape:
            raise ValueError(f"%{gradient} is no gradient of %{name}")


def _scalar(instruction: GradientNorm | ClipFactor) -> None:
    if instruction.type.shape or not instruction.type.dtype.is_floating_point:
        raise ValueError(f"%{instruction.result} is {instruction.type}, no number")


def _of_rank(_: SendToRank | ReceiveFromRank, __: Scope) -> None:
    raise ValueError("this stands in the share of a rank alone, in place of a copy")


def _number(what: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise ValueError(f"{actual} {what} stand where {expected} are expected")


_CONDITIONS: dict[type, Callable[[Any, Scope], None]] = {
    Call: _call,
    Collective: _exchange,
    AllGather: _gather,
    ReduceScatter: _scatter,
    AllReduce: _sum,
    GradientNorm: _norm,
    ClipFactor: _factor,
    ClipValues: _gradients,
    UpdateFactors: lambda i, scope: check_factors(i, scope.has, scope.update_functions),
    UpdatePart: lambda i, scope: check_part(i, scope.has, scope.update_functions),
    JointUpdate: lambda i, scope: check_joint(i, scope.has, scope.update_functions),
    Update: lambda i, scope: check_update(i, scope.has, scope.updated, scope.update_functions),
    SendToRank: _of_rank,
    ReceiveFromRank: _of_rank,
}

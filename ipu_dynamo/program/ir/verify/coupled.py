"""Check the numbers that updates by functions take: of hyperparameters, and of each other."""

from collections.abc import Mapping, Sequence

from ipu_dynamo.program.ir.coupled_update import JointUpdate, UpdatePart
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_factors import UpdateFactors
from ipu_dynamo.program.ir.verify.residence import Residence

Functions = Mapping[str, Function]


def check_factors(factors: UpdateFactors, has: Residence, functions: Functions) -> None:
    """Check the instruction before a step, and note what it makes.

    Raises:
        ValueError: what does not fit.
    """
    function = _named(factors.function, functions)
    counters = [has.at(name, factors.ipu) for name in factors.counters]
    for name in factors.counters:
        if has.variable(name).kind != "state":
            raise ValueError(f"%{name} is no state")
    taken = function.inputs[len(factors.hyperparameters) :]
    if list(taken) != counters or any(type_.shape for type_ in function.inputs):
        raise ValueError(f"@{function.name} takes other numbers")
    if len(factors.results) != len(factors.types):
        raise ValueError(f"{len(factors.results)} results have {len(factors.types)} types")
    expected = [*factors.types, *counters]
    if list(function.outputs[:-1]) != expected or str(function.outputs[-1]) != "b8[]":
        raise ValueError(f"@{function.name} gives other numbers")
    for name, type_ in zip(factors.results, factors.types, strict=True):
        has.define(name, factors.ipu, type_, factors)


def check_part(part: UpdatePart, has: Residence, functions: Functions) -> None:
    """Check what is computed of one parameter, and note what it makes.

    Raises:
        ValueError: what does not fit.
    """
    function = _named(part.function, functions)
    if has.variable(part.parameter).kind != "parameter":
        raise ValueError(f"%{part.parameter} is no parameter")
    weight, total = has.at(part.parameter, part.ipu), has.at(part.gradient, part.ipu)
    taken = function.inputs
    gradient = taken[1] if len(taken) > 1 else None
    if total.shape != weight.shape or gradient is None or gradient.shape != weight.shape:
        raise ValueError(f"%{part.gradient} is no gradient of %{part.parameter}")
    rest = [has.at(name, part.ipu) for name in (*part.states, *part.numbers)]
    if list(taken) != [weight, gradient, *rest]:
        raise ValueError(f"@{function.name} takes something else than {weight} and its states")
    if part.divisor == 0:
        raise ValueError("gradients are divided by 0")
    for number in filter(None, (part.loss_scale, part.clip)):
        if has.at(number, part.ipu).shape:
            raise ValueError(f"gradients are divided by %{number}, which is no number")
    _check_results(function, part.results, part.types, ())
    for name, type_ in zip(part.results, part.types, strict=True):
        has.define(name, part.ipu, type_, part)


def check_joint(joint: JointUpdate, has: Residence, functions: Functions) -> None:
    """Check what is computed of several parameters together, and note what it makes.

    Raises:
        ValueError: what does not fit.
    """
    function = _named(joint.function, functions)
    taken = [has.at(name, joint.ipu) for name in joint.arguments]
    if list(function.inputs) != taken:
        raise ValueError(f"@{function.name} takes other values")
    for name in joint.written:
        if has.variable(name).kind != "state":
            raise ValueError(f"%{name} is no state")
    written = [has.at(name, joint.ipu) for name in joint.written]
    _check_results(function, joint.results, joint.types, written)
    for name, type_ in zip(joint.results, joint.types, strict=True):
        has.define(name, joint.ipu, type_, joint)


def _check_results(
    function: Function,
    results: Sequence[str],
    types: Sequence[TensorType],
    written: Sequence[TensorType],
) -> None:
    if len(results) != len(types):
        raise ValueError(f"{len(results)} results have {len(types)} types")
    if list(function.outputs) != [*types, *written]:
        raise ValueError(f"@{function.name} gives something else")


def _named(name: str, functions: Functions) -> Function:
    if name not in functions:
        raise ValueError(f"no function of an update is called {name}")
    return functions[name]

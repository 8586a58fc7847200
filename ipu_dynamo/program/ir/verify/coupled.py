"""Check the numbers that updates by functions take: of hyperparameters, and of each other."""

from collections.abc import Mapping, Sequence

from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_instructions import JointUpdate, UpdateFactors, UpdatePart
from ipu_dynamo.program.ir.verify.residence import Residence

Functions = Mapping[str, Function]


def check_factors(factors: UpdateFactors, has: Residence, functions: Functions) -> None:
    """Check the function of the instruction before a step.

    Raises:
        ValueError: its signature does not fit.
    """
    function = _named(factors.function, functions)
    counters = [has.at(name, factors.ipu) for name in factors.counters]
    taken = function.inputs[len(factors.hyperparameters) :]
    if list(taken) != counters or any(type_.shape for type_ in function.inputs):
        raise ValueError(f"@{function.name} takes other numbers")
    expected = [*factors.types, *counters]
    if list(function.outputs[:-1]) != expected or str(function.outputs[-1]) != "b8[]":
        raise ValueError(f"@{function.name} gives other numbers")


def check_part(part: UpdatePart, has: Residence, functions: Functions) -> None:
    """Check the function that computes values of one parameter.

    Raises:
        ValueError: its signature does not fit.
    """
    function = _named(part.function, functions)
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
    _check_results(function, part.types)


def check_joint(joint: JointUpdate, has: Residence, functions: Functions) -> None:
    """Check the function that computes values of several parameters.

    Raises:
        ValueError: its signature does not fit.
    """
    function = _named(joint.function, functions)
    taken = [has.at(name, joint.ipu) for name in joint.arguments]
    if list(function.inputs) != taken:
        raise ValueError(f"@{function.name} takes other values")
    written = [has.at(name, joint.ipu) for name in joint.written]
    _check_results(function, [*joint.types, *written])


def _check_results(function: Function, types: Sequence[TensorType]) -> None:
    if list(function.outputs) != [*types]:
        raise ValueError(f"@{function.name} gives something else")


def _named(name: str, functions: Functions) -> Function:
    if name not in functions:
        raise ValueError(f"no function of an update is called {name}")
    return functions[name]

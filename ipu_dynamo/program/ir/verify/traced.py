"""Check that traced updates find their functions, and these what they take."""

from collections.abc import Mapping, Sequence

from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.instructions import Update
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


def check_traced(update: Update, has: Residence, functions: Functions) -> None:
    """Check an update by functions.

    Raises:
        ValueError: what does not fit.
    """
    assert update.function is not None
    function = _named(update.function, functions)
    if len(update.numbers) != len(update.parameters):
        raise ValueError(
            f"{len(update.parameters)} parameters, {len(update.numbers)} sets of numbers"
        )
    for place, name in enumerate(update.parameters):
        weight = has.variable(name).type
        states = [has.variable(names[place]) for _, names in update.states]
        for state in states:
            if state.kind != "state" or state.ipu != update.ipu:
                raise ValueError(f"%{state.name} is no state of %{name} on ipu{update.ipu}")
            has.at(state.name, update.ipu, shard=True)
        numbers = [has.at(number, update.ipu) for number in update.numbers[place]]
        kept = [state.type for state in states]
        _check_signature(function, weight, kept, numbers)


def _check_signature(
    function: Function,
    weight: TensorType,
    states: Sequence[TensorType],
    numbers: Sequence[TensorType],
) -> None:
    taken, returned = function.inputs, function.outputs
    gradient = taken[1] if len(taken) > 1 else None
    fits = gradient is not None and gradient.shape == weight.shape
    if not fits or list(taken) != [weight, gradient, *states, *numbers]:
        raise ValueError(f"@{function.name} takes something else than a {weight} and its states")
    new = returned[0]
    fits = new is not None and new.shape == weight.shape and new.dtype.is_floating_point
    if not fits or list(returned[1:]) != list(states):
        raise ValueError(f"@{function.name} gives something else than a {weight} and its states")


def _named(name: str, functions: Functions) -> Function:
    if name not in functions:
        raise ValueError(f"no function of an update is called {name}")
    return functions[name]

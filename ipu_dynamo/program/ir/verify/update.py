"""Check that an update finds its variables, and a function that takes and returns their types."""

from collections.abc import Mapping, Sequence

from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.rule_function import function_at
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_instructions import Update
from ipu_dynamo.program.ir.update_rules import TracedRule
from ipu_dynamo.program.ir.values import Variable
from ipu_dynamo.program.ir.verify.residence import Residence


def check_update(
    update: Update, has: Residence, updated: set[str], functions: Mapping[str, Function]
) -> None:
    """Check an update, and note its effects.

    Args:
        updated: the parameters so far.
        functions: of traced updates, by name.

    Raises:
        ValueError: a variable or a type does not fit.
    """
    rule, names = update.rule, [state for state, _ in update.states]
    if isinstance(rule, TracedRule) != (update.function is not None):
        raise ValueError("a traced update, and no other, has a function")
    if update.function is None and names != (kept := [spec.name for spec in rule.state_names()]):
        raise ValueError(f"{rule} keeps {kept}, not {names}")
    if strangers := set(update.sharded) - set(update.parameters):
        raise ValueError(f"%{min(strangers)} is in shards, and is no parameter of this update")
    if update.divisor == 0:
        raise ValueError("gradients are divided by 0")
    for place, name in enumerate(update.parameters):
        if name in updated:
            raise ValueError(f"%{name} is updated twice")
        updated.add(name)
        _check_one(update, place, has, functions)
    has.whole.clear()


def _check_one(
    update: Update, place: int, has: Residence, functions: Mapping[str, Function]
) -> None:
    """Check a parameter with its gradient and its states."""
    name = update.parameters[place]
    parameter, gradient = has.variable(name), update.gradients[place]
    total = has.at(gradient, update.ipu, shard=True)
    if total.shape != parameter.type.shape:
        raise ValueError(f"%{gradient} has shape {list(total.shape)}, %{name} is {parameter.type}")
    states = [has.variable(names[place]) for _, names in update.states]
    if update.function is None:
        _check_states(states, update.rule.state_types(parameter.type))
    else:
        numbers = [has.at(number, update.ipu) for number in update.numbers[place]]
        function = function_at(update, functions, parameter.type, total)
        _check_signature(function, parameter, states, numbers)
    own = [parameter, *states]
    sharded = max(variable.shards for variable in own) > 1
    if sharded != (name in update.sharded):
        raise ValueError(f"%{name} is updated in shards if it or a state is in shards")
    if sharded:
        has.stale |= {v.name for v in own if v.shards == 1 and v.type.shape}


def _check_states(states: Sequence[Variable], types: Sequence[TensorType | None]) -> None:
    for state, expected in zip(states, types, strict=False):
        if state.type != expected:
            raise ValueError(f"%{state.name} is state {state.type}, not state {expected}")


def _check_signature(
    function: Function,
    parameter: Variable,
    states: Sequence[Variable],
    numbers: Sequence[TensorType],
) -> None:
    weight, count = parameter.type, len(states) + 2
    taken, returned = function.inputs, function.outputs
    gradient = taken[1] if len(taken) > 1 else None
    _check_states(states, taken[2:])
    fits = gradient is not None and gradient.shape == weight.shape and taken[0] == weight
    if not fits or len(taken) < count or list(taken[count:]) != list(numbers):
        raise ValueError(f"@{function.name} takes something else than a {weight} and its states")
    new = returned[0]
    fits = new is not None and new.shape == weight.shape and new.dtype.is_floating_point
    if not fits or list(returned[1:]) != [state.type for state in states]:
        raise ValueError(f"@{function.name} gives something else than a {weight} and its states")

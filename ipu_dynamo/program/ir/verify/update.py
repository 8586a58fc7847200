"""Check that an update finds its parameters, gradients and states, one for one."""

from collections.abc import Sequence

from ipu_dynamo.program.ir.instructions import Update
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_rules import StateSpec, Traced
from ipu_dynamo.program.ir.verify.residence import Residence


def check_update(update: Update, has: Residence, updated: set[str]) -> None:
    """Check an update, and note what it leaves: `updated` are the parameters so far.

    Raises:
        ValueError: what does not fit.
    """
    traced = isinstance(update.rule, Traced)
    if traced != (update.function is not None):
        raise ValueError("a traced update, and no other, has a function")
    specs = () if isinstance(update.rule, Traced) else update.rule.state_names()
    names = tuple(state for state, _ in update.states)
    if not traced and names != tuple(spec.name for spec in specs):
        raise ValueError(f"{update.rule} keeps {[spec.name for spec in specs]}, not {list(names)}")
    for what, column in (("gradients", update.gradients), *update.states):
        if len(column) != len(update.parameters):
            raise ValueError(f"{len(update.parameters)} parameters have {len(column)} {what}")
    if strangers := set(update.sharded) - set(update.parameters):
        raise ValueError(f"%{min(strangers)} is in shards, and is no parameter of this update")
    if update.divisor == 0:
        raise ValueError("gradients are divided by 0")
    for number in filter(None, (update.loss_scale, update.clip)):
        if has.at(number, update.ipu).shape:
            raise ValueError(f"gradients are divided by %{number}, which is no number")
    for place, name in enumerate(update.parameters):
        if name in updated:
            raise ValueError(f"%{name} is updated twice")
        updated.add(name)
        _check_one(update, place, name, specs, has)
    has.whole.clear()


def _check_one(
    update: Update, place: int, name: str, specs: Sequence[StateSpec], has: Residence
) -> None:
    """Check a parameter with its gradient and its states."""
    parameter, gradient = has.variable(name), update.gradients[place]
    if parameter.kind != "parameter":
        raise ValueError(f"%{name} is a {parameter.kind}, no parameter")
    has.at(name, update.ipu, shard=True)
    shape = has.at(gradient, update.ipu, shard=True).shape
    if shape != parameter.type.shape:
        raise ValueError(f"%{gradient} has shape {list(shape)}, %{name} is {parameter.type}")
    own = [parameter]
    if update.function is not None:  # whose signature says what they are
        own += [has.variable(names[place]) for _, names in update.states]
    for spec, (_, names) in zip(specs, update.states if specs else (), strict=True):
        state = has.variable(names[place])
        whole = spec.shape == "like_parameter"
        expected = TensorType(
            spec.dtype or parameter.type.dtype, parameter.type.shape if whole else ()
        )
        if state.kind != "state" or state.type != expected:
            raise ValueError(f"%{state.name} is {state.kind} {state.type}, not state {expected}")
        if state.ipu != parameter.ipu:
            raise ValueError(f"%{state.name} lives on ipu{state.ipu}, %{name} does not")
        has.at(state.name, update.ipu, shard=True)
        own.append(state)
    sharded = max(variable.shards for variable in own) > 1
    if sharded != (name in update.sharded):
        raise ValueError(f"%{name} is updated in shards if it or a state is in shards")
    if sharded:
        has.stale |= {v.name for v in own if v.shards == 1 and v.type.shape}

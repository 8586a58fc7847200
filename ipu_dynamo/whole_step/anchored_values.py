"""Name the values inside a compiled model, and find those of its anchors."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import Anchor
from ipu_dynamo.program import Output, TensorType
from ipu_dynamo.program.ir.made_names import in_files
from ipu_dynamo.runtime.execute.memory.step_records import RecordedVariable, When
from ipu_dynamo.whole_step.compile_model import Compiled
from ipu_dynamo.whole_step.weights.initial_state import updates


class UnknownValue(CompileError):
    """An anchor is of a value that the program does not have."""


@dataclass(frozen=True, slots=True)
class ValueNames:
    """The names of the values inside a program; an anchor can be of each of them.

    Args:
        variables: parameters, buffers, states of the optimiser, the loss scale.
        inputs: arguments.
        operators: results of operators, `module/Operator:result`.
        gradients: parameters and results of operators that have a gradient.
        updates: parameters that are updated.
    """

    variables: tuple[str, ...]
    inputs: tuple[str, ...]
    operators: tuple[str, ...]
    gradients: tuple[str, ...]
    updates: tuple[str, ...]


_NAMES = "look at value_names of a CompiledModel, or getTensorNames() of an executor of poptorch"


def value_names(compiled: Compiled) -> ValueNames:
    """The names of the values inside a compiled model."""
    held = _held(compiled)
    trained = [name for update in updates(compiled.program) for name in update.parameters]
    return ValueNames(
        variables=tuple({**dict.fromkeys(held), **_kept(compiled)}),
        inputs=compiled.input_names,
        operators=compiled.names,
        gradients=compiled.gradients,
        updates=tuple(trained),
    )


def wanted_variables(
    compiled: Compiled, anchors: Mapping[str, Anchor]
) -> dict[str, RecordedVariable]:
    """The variables that the runtime has to record for anchors that are no output streams.

    Raises:
        UnknownValue: there is nothing of an anchor's name.
    """
    names, kept = value_names(compiled), _kept(compiled)
    types = {name: TensorType.of(tensor) for name, tensor in compiled.tensors.items()}
    types |= {variable.name: variable.type for variable in compiled.program.variables}
    wanted = {}
    for short, anchor in anchors.items():
        if short in compiled.anchors:
            continue
        known = {
            "value": (*names.variables, *names.inputs, *names.operators),
            "gradient": names.gradients,
            "update": names.updates,
        }[anchor.of]
        variable = kept.get(anchor.name, anchor.name)
        if anchor.of == "gradient" or anchor.name not in known or variable not in types:
            raise _unknown(short, anchor, known)
        lasts = anchor.returns == "final" and variable not in _in_force(compiled)
        when: When = "after" if anchor.of == "update" or lasts else "before"
        output = Output(short, types[variable], anchor.returns, anchor.period)
        wanted[short] = RecordedVariable(variable, when, output)
    return wanted


def _held(compiled: Compiled) -> list[str]:
    """The names of the model's parameters and buffers."""
    kinds: dict[str, str] = {role.name: role.kind for role in compiled.roles.values()}
    kinds |= {variable.name: variable.kind for variable in compiled.program.variables}
    return [name for name, kind in kinds.items() if kind in ("parameter", "buffer")]


def _kept(compiled: Compiled) -> dict[str, str]:
    """The variables of the loss scale, and of the optimiser's states by parameter and name of the
    state, by the names that users give them."""
    taken = {*_held(compiled), *compiled.input_names}
    found: dict[str, str] = {}
    for name in _in_force(compiled):
        short = in_files(name)
        while short in taken:
            short += "'"
        found[short] = name
    return found | {
        f"{parameter}.{state}": variable
        for update in updates(compiled.program)
        for state, variables in update.states
        for parameter, variable in zip(update.parameters, variables, strict=True)
    }


def _in_force(compiled: Compiled) -> list[str]:
    """The variables with numbers of a step: the final value of one is that of the last step."""
    return [v.name for v in compiled.program.variables if v.kind == "loss_scale"]


def _unknown(short: str, anchor: Anchor, known: tuple[str, ...]) -> UnknownValue:
    what = "value" if anchor.of == "value" else f"{anchor.of} of a value"
    near = get_close_matches(anchor.name, known, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else _NAMES
    return UnknownValue(f"anchor {short}: there is no {what} called {anchor.name}", hint=hint)

"""Read programs of form 4, whose made names may be those of the user's tensors, too."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

from torch import Tensor

from ipu_dynamo.program import Program, Repeat, Update
from ipu_dynamo.program.ir.made_names import alone, in_files, made_of, state
from ipu_dynamo.program.ir.verify.program import verify
from ipu_dynamo.program.text.program_text import parse_text

FORM_4 = 4
_MADE_OF = re.compile(r"(.+)\.(grad|before|new|off|(?:on|returned|phase|stage|weights)\d+)")
_USERS = ("parameter", "buffer", "constant", "whole", "host")
_NAMES = frozenset(  # fields of variables, streams and instructions
    {
        "accumulators", "arguments", "clip", "counters", "gradient", "gradients", "loss_scale",
        "name", "norms", "numbers", "parameter", "parameters", "result", "results", "scale",
        "sharded", "so_far", "steps", "stream", "value", "values", "variables", "weight", "within",
        "written",
    }
)  # fmt: skip


def parse_form_4(text: str, constants: Mapping[str, Tensor]) -> Program:
    """A program from its text of form 4, with the names of today.

    Raises:
        ValueError: the text is not a program, or the program is invalid.
    """
    program = parse_text(text, Program, constants)
    kinds: dict[str, str] = {variable.name: variable.kind for variable in program.variables}
    kinds |= {stream.name: stream.source for stream in program.inputs}
    new = cache(partial(_new_name, kinds=kinds))
    program = replace(
        program,
        variables=tuple(_renamed(variable, new) for variable in program.variables),
        inputs=tuple(_renamed(stream, new) for stream in program.inputs),
        body=tuple(_renamed(instruction, new) for instruction in program.body),
    )
    verify(program)
    return program


def variables_of(written: Mapping[str, Any], program: Program) -> dict[str, Any]:
    """A table of form 4 by the names of variables, with the names in `program`."""
    names = {in_files(variable.name): variable.name for variable in program.variables}
    return {names.get(name, name): value for name, value in written.items()}


def _new_name(name: str, kinds: Mapping[str, str]) -> str:
    kind = kinds.get(name, "")
    if kind in _USERS:
        return name
    if kind == "state":
        owners = [p for p in kinds if kinds[p] == "parameter" and name.startswith(f"{p}.")]
        owner = max(owners, key=len, default="")
        return state(owner, name.removeprefix(f"{owner}.")) if owner else alone(name)
    if made := _MADE_OF.fullmatch(name):
        return made_of(_new_name(made[1], kinds), made[2])
    return alone(name) if kind or "." in name else name


def _renamed(record: Any, new: Callable[[str], str]) -> Any:
    """A variable, stream or instruction with other names."""
    if isinstance(record, Repeat):
        return replace(record, body=tuple(_renamed(inner, new) for inner in record.body))

    def every(names: Any) -> Any:
        if isinstance(names, tuple):
            return tuple(map(every, names))
        return names if names is None else new(names)

    changes = {f.name: every(getattr(record, f.name)) for f in fields(record) if f.name in _NAMES}
    if isinstance(record, Update):
        changes["states"] = tuple((key, every(names)) for key, names in record.states)
    elif hasattr(record, "states"):
        changes["states"] = every(record.states)
    return replace(record, **changes)

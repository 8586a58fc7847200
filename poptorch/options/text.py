"""Set options from JSON, or from a file of calls."""

import json
from pathlib import Path
from types import CodeType
from typing import Any

from poptorch import enums
from poptorch.errors import createPoptorchError

NAMES: dict[str, Any] = {}  # that a file of options may use: the package puts itself here


class ConfigFileError(Exception):
    """A line of a file of options is no Python expression."""


def apply_json(options: object, text: str) -> None:
    """Call the setters that a JSON object names.

    Args:
        options: what to set.
        text: an object from accessors, such as "Training.gradientAccumulation", to an argument
            or a list of arguments. "OutputMode.All" and the like stand for that member.
    """
    try:
        calls = json.loads(text)
    except json.JSONDecodeError as error:
        raise createPoptorchError(
            f"options are no valid JSON: {error} in {text!r}", id="option"
        ) from error
    if not isinstance(calls, dict):
        raise createPoptorchError(
            f'options are a JSON object such as {{"deviceIterations": 2}}, got {text!r}',
            id="option",
        )
    for accessor, value in calls.items():
        target: Any = options
        for name in accessor.split("."):
            target = getattr(target, name)
        if not callable(target):
            raise createPoptorchError(
                f"{accessor} is a value and no setter: name a setter such as deviceIterations",
                id="option",
            )
        arguments = value if isinstance(value, list) else [value]
        target(*map(_argument, arguments))


def apply_file(options: object, filepath: str) -> None:
    """Make the calls that a trusted file lists, one a line, without their "options." in front.

    All lines are compiled before the first one runs.
    """
    path = Path(filepath)
    stripped = (line.strip() for line in path.read_text().splitlines())
    lines = {n: line for n, line in enumerate(stripped, 1) if line and not line.startswith("#")}
    compiled = {number: _compile(line, number, path) for number, line in lines.items()}
    names = {"options": options, **NAMES}
    for number, code in compiled.items():
        try:
            exec(code, names)
        except Exception as error:
            error.add_note(f"in line {number} of {path.name}: {lines[number]}")
            raise


def _compile(line: str, number: int, path: Path) -> CodeType:
    statement = f"options.{line}"
    try:
        return compile(statement, str(path), "exec")
    except SyntaxError as error:
        raise ConfigFileError(
            f"{type(error).__name__} at line {number} of {path.name}: {error.msg}\n> {statement}"
        ) from error


def _argument(value: Any) -> Any:
    """The member of an enumeration that a string names, or the value itself."""
    if not isinstance(value, str):
        return value
    kind, _, member = value.partition(".")
    if kind in enums.__all__:
        return getattr(enums, kind).__members__.get(member, value)
    return value

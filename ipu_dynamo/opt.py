"""Run passes on a model in a file: `python -m ipu_dynamo.opt FILE -p 'Recompute(mode="all")'`.

A file holds a model at one level, as `IPU_DYNAMO_DUMP` writes it after each pass: a traced or joint
graph, directions, parts or a program. Files of other levels are for readers only. The manager runs
and checks the passes as in a compilation. The result is printed in the form of a file. Nothing in a
file or a pass is run as Python.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ipu_dynamo.errors import IpuError
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.level_text import parse_level, write_level
from ipu_dynamo.passes.levels import Model
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import all_passes
from ipu_dynamo.passes.program.emit_update import UpdateGroup
from ipu_dynamo.program.text.reader import Reader, Record
from ipu_dynamo.program.text.records import build
from ipu_dynamo.replace_file import replacing
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the result is its exit code."""
    parser, place = _parser(), "-p"  # where an error is
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(f"{step.level:<10} {step.name}" for step in all_passes()))
        return 0
    if args.file is None:
        parser.error("the following arguments are required: FILE")
    try:
        steps = [*map(read_pass, args.passes)]
        place = args.file
        text = write_level(run_passes(parse_level(_read(args.file)), steps))
        if args.output is None:
            sys.stdout.write(text)
        else:
            place = args.output
            with replacing(args.output) as file:
                file.write(text.encode())
    except (ValueError, AssertionError, OSError, IpuError) as error:
        print(f"{place}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 1
    return 0


def run_passes(model: Model, steps: Sequence[Pass]) -> Model:
    """Run passes on a model in place, and return the result.

    Raises:
        Exception: a pass fails, or takes another level; a note names the pass.
    """
    return PassManager("opt", first="read").run(steps, model)


def read_pass(text: str) -> Pass:
    """A pass by its name, with options as in Python: `Recompute(mode="all")`, or `Recompute`.

    Raises:
        ValueError: the pass, its option or this value of the option does not exist.
    """
    try:
        reader = Reader(text if "(" in text else f"{text}()")
        record = reader.value()
        reader.end()
        return _pass_of(record)
    except (ValueError, TypeError) as error:
        raise ValueError(f"pass {text!r}: {error}") from error


def _pass_of(record: object) -> Pass:
    if not isinstance(record, Record):
        raise ValueError("expected a name with options, as in Recompute(mode=...)")
    classes = {step.name: type(step) for step in all_passes()}
    if record.name not in classes:
        near = get_close_matches(record.name, classes, n=3) or sorted(classes)
        raise ValueError(f"there is no pass {record.name!r}; did you mean: {', '.join(near)}?")
    made: Pass = _made(classes[record.name], record.fields)
    return made


def _made(type_: Any, values: Mapping[str, Any]) -> Any:
    """An object of a class whose fields may hold passes, or groups of an optimiser."""
    hints = get_type_hints(type_)
    kinds = {field.name: hints[field.name] for field in fields(type_)}
    for name in values:
        if name not in kinds:
            options = ", ".join(kinds) or "no options"
            raise ValueError(f"{type_.__name__} has no option {name}; it has {options}")
    return type_(**{name: _option(value, kinds[name], name) for name, value in values.items()})


def _option(value: Any, kind: Any, name: str) -> Any:
    """The value of an option of this type."""
    (part, *_) = get_args(kind) or (None,)
    if part is Pass and isinstance(value, tuple):
        return tuple(map(_pass_of, value))
    if part is UpdateGroup and isinstance(value, tuple | list):
        return tuple(build(group, Group, name) for group in value)
    return build(value, kind, name)


def _read(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ipu_dynamo.opt", description="Run passes on a model in a file."
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="a model as text; -: from stdin")
    parser.add_argument(
        "-p",
        dest="passes",
        metavar="PASS",
        action="append",
        default=[],
        help="""a pass with its options, such as 'Recompute(mode="all")'; in order""",
    )
    parser.add_argument("-o", dest="output", metavar="OUT", help="a file in place of stdout")
    parser.add_argument("--list", action="store_true", help="list all passes with their levels")
    return parser


if __name__ == "__main__":
    sys.exit(main())

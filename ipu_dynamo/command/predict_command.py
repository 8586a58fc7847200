"""Predict the memory and cycles of a program as text, a report or a trace, for `ipu-dynamo`."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ipu_dynamo.errors import IpuError
from ipu_dynamo.machine.predict_program import predict_program
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.machine.system import system_of
from ipu_dynamo.program import Program
from ipu_dynamo.replace_file import replacing
from ipu_dynamo.report.html_page import write_report
from ipu_dynamo.report.trace import write_trace
from ipu_dynamo.saved.archive import Archive
from ipu_dynamo.whole_step.predict_model import predict
from ipu_dynamo.whole_step.saving.load import open_entry

DOES_NOT_FIT, UNUSABLE = 1, 2
_FUNCTION = re.compile(r"[\w.]+:[\w.]+")
_WHAT = (
    "a program's text, a file of ipu_dynamo.save, a prediction's JSON, or the module:function of "
    "Python code"
)
_MOST_BYTES = 1 << 28  # of a program's text, or of a prediction
_OUTPUTS: dict[str, tuple[str, Callable[[Prediction, str], None]]] = {
    "report": ("report.html", write_report),
    "trace": ("trace.json", write_trace),
}


class _Unusable(Exception):
    """The input cannot be used."""


def show_prediction(options: argparse.Namespace) -> int:
    """Do one of the subcommands `predict`, `report` and `trace`; the result is the exit code."""
    try:
        prediction = _prediction(options.what, options.machine, options.entry)
        if options.json:
            with replacing(options.json) as file:
                file.write(prediction.to_json())
        if options.command == "predict":
            _print(str(prediction), options.output)
        else:
            default, write = _OUTPUTS[options.command]
            write(prediction, options.output or default)
            print(options.output or default)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has enough of it
        return UNUSABLE
    except (_Unusable, IpuError, OSError, ValueError) as error:
        print(f"ipu-dynamo: {_one_line(error)}", file=sys.stderr)
        return UNUSABLE
    return DOES_NOT_FIT if prediction.verdict.word == "does not fit" else 0


def _prediction(what: str, machine: str | None, entry: str | None) -> Prediction:
    """The prediction of a file, or of the result of a function."""
    if Path(what).exists() or not _FUNCTION.fullmatch(what):
        return _of_file(Path(what), machine, entry)
    return _of_function(what, machine)


def _of_file(path: Path, machine: str | None, entry: str | None) -> Prediction:
    """The prediction of a program in a file, or the one that the file holds. Nothing in it runs."""
    if path.is_dir():
        raise _Unusable(f"{path} is a folder, which ipu-saved-model shows and runs: give {_WHAT}")
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise _Unusable(f"{path}: there is no such file: give {_WHAT}") from error
    except OSError as error:
        raise _Unusable(f"{path}: {error.strerror or error}") from error
    if content.startswith(b"PK"):
        program = _saved_program(path, entry)
    elif len(content) > _MOST_BYTES:
        raise _Unusable(f"{path}: it has more than {_MOST_BYTES} bytes")
    elif content.lstrip().startswith(b"{"):
        if machine is not None:
            raise _Unusable(f"{path}: a prediction has its machine already: leave out --machine")
        with _reading(path):
            return Prediction.from_json(content)
    elif not content.startswith(b"ipu_dynamo program"):
        raise _Unusable(f"{path} holds no program: give {_WHAT}")
    else:
        with _reading(path):
            program = Program.parse(content.decode("utf-8"))
    system = system_of(machine or _default_machine())
    arguments = [str(path), *(["--entry", entry] if entry else []), "--machine", system.name]
    return predict_program(program, system, model=path.stem, command=_command(arguments))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in errors of reading it."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"{path}: {error}") from error


def _saved_program(path: Path, entry: str | None) -> Program:
    """The program of an entry point of a saved program, whichever front end wrote it."""
    with Archive(path) as archive:
        listed = archive.head.get("entries")
        names = [name for name in listed if isinstance(name, str)] if type(listed) is list else []
        if entry is None and len(names) == 1:
            entry = names[0]
        if entry not in names:
            known = ", ".join(names) or "none"
            raise _Unusable(f"{path}: choose one of its entry points with --entry: {known}")
        return open_entry(archive, entry).program


def _of_function(what: str, machine: str | None) -> Prediction:
    """The prediction of the result of `module:function`."""
    module, _, names = what.partition(":")
    sys.path.insert(0, "")  # as for `python -m`
    try:
        made: Any = import_module(module)
        for name in names.split("."):
            made = getattr(made, name)
        result = made()
    except Exception as error:
        raise _Unusable(f"{what}: {type(error).__name__}: {error}") from error
    model, *arguments = result if isinstance(result, tuple) else (result,)
    system = machine or _default_machine()
    try:
        prediction = predict(model, *arguments, machine=system)
    except IpuError:
        raise
    except Exception as error:  # of the model's own code
        problem = f"{what}: {type(error).__name__}: {error}"
        if isinstance(model, nn.Module) and not arguments:
            problem = (
                f"{what} returned {type(model).__name__} without arguments: return a tuple of the "
                f"model and the arguments of a micro-batch, (model, x) ({error})"
            )
        raise _Unusable(" ".join([problem, *getattr(error, "__notes__", ())])) from error
    command = _command([what, "--machine", prediction.system])
    return replace(prediction, reproduce=replace(prediction.reproduce, command=command))


def _default_machine() -> str:
    return os.environ.get("IPU_DYNAMO_MACHINE") or "bow"


def _command(arguments: Sequence[str]) -> str:
    """The command that makes a prediction again."""
    return shlex.join(["ipu-dynamo", "predict", *arguments])


def _print(text: str, output: str | None) -> None:
    if output is None:
        print(text, flush=True)
        return
    with replacing(output) as file:
        file.write(f"{text}\n".encode())


def _one_line(error: Exception) -> str:
    """An error in one line of printable characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)

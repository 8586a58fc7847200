"""Show what was compiled: in a file or in the log, as the environment asks, and as JSON."""

import gzip
import json
import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ipu_dynamo.program import Call, Program
from ipu_dynamo.runtime.execute.executable import Executable
from poptorch._logging import DEBUG_IR, TRACE, logger
from poptorch.errors import createPoptorchError

_FILE, _BINARY = "POPTORCH_EXPORT_PROTO_FILE", "POPTORCH_EXPORT_PROTO_AS_BINARY"
_LINES = "POPTORCH_MAX_GRAPH_LEN"
_DEFAULT_LINES = 10
_DEFAULT_NAME = "model.proto"


def export_program(program: Program) -> None:
    """Write the full text of a program to the file that POPTORCH_EXPORT_PROTO_FILE names, and its
    first lines to the log at level TRACE."""
    if name := os.environ.get(_FILE):
        path = Path(name) if Path(name).suffix else Path(name, _DEFAULT_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = program.text().encode("ascii")
        path.write_bytes(gzip.compress(text, mtime=0) if _number(_BINARY, 0) else text)
    if logger.isEnabledFor(TRACE):
        lines = str(program).splitlines()
        most = _number(_LINES, _DEFAULT_LINES)
        if 0 < most < len(lines):
            lines = [*lines[:most], f"... {len(lines) - most} more lines ({_LINES})"]
        logger.log(TRACE, "%s", "\n".join(lines))


def log_program(executable: Executable, folder: str, name: str) -> None:
    """Write the compiled program, and its form for this computer, into a file of `folder`, at the
    log levels DEBUG_IR and TRACE.

    Args:
        name: of the file; the first number that is free is appended.
    """
    if not logger.isEnabledFor(DEBUG_IR):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in count():
        path = Path(folder, f"{name}_{number}.txt")
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(f"{executable.program}\n\n{executable.host_program}\n")
            logger.log(DEBUG_IR, "the program of %s is in %s", name, path)
            return


def program_json(program: Program) -> str:
    """The operators and other instructions of a program, in order, and what its stages stash.

    An object with one key, "maingraph": a list of objects with a "type", such as "convolution" or
    "Stash", a "name", and where it has one its "ipu".
    """
    functions = {function.name: function for function in program.functions}
    nodes: list[dict[str, Any]] = [
        {"type": "Stash", "name": name, "ipu": stash.ipu}
        for stash in program.stash
        if stash.copies > 1
        for name, _ in stash.values
    ]
    for instruction in program.walk():
        if isinstance(instruction, Call):
            nodes += [
                {"type": _operator(node.target), "name": node.name, "ipu": instruction.ipu}
                for node in functions[instruction.function].operators
            ]
        else:
            kind = type(instruction).__name__
            nodes.append({"type": kind, "name": str(instruction).splitlines()[0].strip()})
    return json.dumps({"maingraph": nodes})


def _operator(target: Any) -> str:
    """The name of an operator without its library and overload."""
    text = str(target)
    return text.split(".")[1] if text.count(".") else str(getattr(target, "__name__", text))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip() or str(default)
    try:
        return int(text)
    except ValueError as error:
        raise createPoptorchError(
            f"{variable} must be an integer, got {text!r}", id="option"
        ) from error

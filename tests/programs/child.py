"""Run one program in this process, from its first line to its last, and check what it claims."""

import ast
import importlib
import io
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch

from tests.programs import inert, steps
from tests.programs.catalogue import PROGRAMS
from tests.programs.program import Program


class EndsEarly(AssertionError):
    """A script has left before its last line."""


class _Copied(io.TextIOBase):
    """Write to a stream, and keep what was written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.text = stream, io.StringIO()

    def write(self, text: str) -> int:
        self.text.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def run(program: Program, source: Path) -> None:
    """Run `source` as a script of its own, and check it.

    Raises:
        AssertionError: it ends early, or the claim is false.
    """
    for path, text in program.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    for path in program.pictures:
        _draw(Path(path))
    if program.prepare:
        program.prepare()
    for path, replaced in program.edits.items():
        Path(path).write_text(_replaced(Path(path).read_text(), replaced))
    module = types.ModuleType("__main__")
    module.__file__ = str(source)
    sys.modules["__main__"], sys.argv = module, [str(source), *program.arguments]
    sys.path.insert(0, str(source.parent))
    torch.manual_seed(0)
    printed = sys.stdout = _Copied(sys.stdout)
    if program.enough:
        steps.record(program.enough)
    try:
        exec(compile(_shortened(program, source.read_text()), str(source), "exec"), vars(module))
    except steps.EnoughSteps:
        pass
    except SystemExit as error:
        raise EndsEarly(f"{program.path} ends with sys.exit({error.code!r})") from error
    program.check(vars(module), printed.text.getvalue())


def _draw(path: Path) -> None:
    from PIL import Image  # one of the program's packages

    path.parent.mkdir(parents=True, exist_ok=True)
    colours = torch.randint(256, (64, 64, 3), dtype=torch.uint8)
    Image.fromarray(colours.numpy()).save(path)


def _shortened(program: Program, text: str) -> ast.Module:
    """The script in its smaller sizes, but for the statements that are to be left out."""
    tree = ast.parse(_replaced(text, program.sizes))
    dropped = {s: ast.unparse(s) for s in tree.body}
    for start in program.without:
        assert any(line.startswith(start) for line in dropped.values()), f"no {start!r}"
    tree.body = [
        s for s, line in dropped.items() if not line.startswith(program.without or ("\0",))
    ]
    return tree


def _replaced(text: str, sizes: Mapping[str, str]) -> str:
    for size, smaller in sizes.items():
        assert size in text, f"no {size!r}"
        text = text.replace(size, smaller)
    return text


if __name__ == "__main__":
    wanted, file = sys.argv[1:]
    if PROGRAMS[wanted].folder:
        inert.allow_missing_libraries()
    elif "transformers" in Path(file).read_text():  # importing it takes seconds
        importlib.import_module("tests.programs.transformers_stand_in").install()
    run(PROGRAMS[wanted], Path(file))

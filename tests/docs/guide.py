"""Run the pages of the user's guide, and write what they show: outputs, and tables of options.

`python -m tests.docs.guide` brings the pages, the README and CONTRIBUTING.md up to date, or those
named; `python -m tests.docs.guide pictures` draws the pictures, or those named. The tests compare.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ipu_dynamo.torch_compile.backend import ipu
from poptorch.options import OptionEffect, table
from tests.docs.arguments import arguments_table
from tests.docs.config_fields import fields_table
from tests.docs.figures import refresh_readme
from tests.docs.keras_keywords import keywords_table
from tests.docs.pictures import PICTURES, measured_table, of_page, write
from tests.repository.private_names import page_table

FOLDER = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(FOLDER.glob("*.md"))
CODE = (
    "ipu_dynamo/*",
    "passes",
    "passes/*",
    "popart",
    "popdist",
    "poptorch",
    "runtime",
    "runtime/*",
)
# a program, and if a block of text follows directly: what it prints
_PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.M
)
_TABLE = re.compile(
    r"(<!-- options: (?P<which>\w+) -->\n).*?(<!-- end of options -->\n)", re.DOTALL
)
_ARGUMENTS = re.compile(
    r"(<!-- arguments: (?P<name>\w+) -->\n).*?(<!-- end of arguments -->\n)", re.DOTALL
)
_KEYWORDS = re.compile(r"(<!-- keywords of Keras -->\n).*?(<!-- end of keywords -->\n)", re.DOTALL)
_NAMES = re.compile(
    r"(<!-- (private names|agreements|kept attributes) -->\n).*?(<!-- end of \2 -->\n)", re.DOTALL
)
_FOLDERS = re.compile(r"(<!-- folders -->\n).*?(<!-- end of folders -->\n)", re.DOTALL)
_MEASURED = re.compile(
    r"(<!-- measured: (?P<name>\w+) -->\n).*?(<!-- end of measured -->\n)", re.DOTALL
)
_CALIBRATION = re.compile(r"(<!-- calibration -->\n).*?(<!-- end of calibration -->\n)", re.DOTALL)
_FIELDS = re.compile(r"(<!-- fields of an IPUConfig -->\n).*?(<!-- end of fields -->\n)", re.DOTALL)


def refreshed(text: str, name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """A page with the outputs and tables that it should show, and the names of its programs.

    Its programs run in order in one module, whose file is `name`.py in `folder`: printed programs
    quote lines of that file.
    """
    programs = [match["code"] for match in _PROGRAM.finditer(text)]
    with _module(name, folder, programs) as (module, file):
        line, outputs = 1, []
        for code in programs:
            padded = "\n" * (line - 1) + code
            line += code.count("\n")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(padded, file, "exec"), module.__dict__)
            outputs.append(printed.getvalue())
        names = dict(module.__dict__)
    results = iter(outputs)

    def with_output(match: re.Match[str]) -> str:
        shown, printed = match["shown"], next(results)
        if shown is None:
            return match[0]
        start, end = match.start("shown") - match.start(), match.end("shown") - match.start()
        return match[0][:start] + printed + match[0][end:]

    text = _PROGRAM.sub(with_output, text)
    text = _TABLE.sub(lambda match: match[1] + options_table(match["which"]) + match[3], text)
    text = _KEYWORDS.sub(lambda match: match[1] + keywords_table() + match[2], text)
    text = _NAMES.sub(lambda match: match[1] + page_table(match[2]) + match[3], text)
    text = _CALIBRATION.sub(lambda match: match[1] + calibration_table() + match[2], text)
    text = _MEASURED.sub(lambda match: match[1] + measured_table(match["name"]) + match[3], text)
    text = _FIELDS.sub(lambda match: match[1] + fields_table() + match[2], text)
    text = _ARGUMENTS.sub(lambda match: match[1] + arguments_table(match["name"]) + match[3], text)
    return text, names


def with_folders(contributing: str) -> str:
    """CONTRIBUTING.md with the first lines of the folders' docstrings."""
    return _FOLDERS.sub(lambda match: match[1] + folders_table() + match[2], contributing)


def folders_table() -> str:
    """What each folder with code does, by its docstring."""
    lines = ["| Folder | What it does |", "| --- | --- |"]
    for pattern in CODE:
        for file in sorted(FOLDER.parent.glob(f"{pattern}/__init__.py")):
            if not file.parent.is_symlink():
                folder = file.parent.relative_to(FOLDER.parent)
                docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "?"
                lines.append(f"| `{folder}/` | {docstring.splitlines()[0]} |")
    return "\n".join(["", *lines, "", ""])


def calibration_table() -> str:
    """The rows of the calibration that have a prediction, as the report shows them."""
    file = files("ipu_dynamo.report") / "assets" / "calibration.json"
    rows = [row for row in json.loads(file.read_text()) if row["predicted"] is not None]
    lines = ["| Measurement | Predicted | Measured | Error | Source |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['name']} | {_rate(row['predicted'])} | {_rate(row['measured'])} {row['unit']} "
        f"| {row['error']:+.1%} | {row['source']} |"
        for row in rows
    ]
    return "\n".join(["", *lines, "", ""])


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def options_table(which: str) -> str:
    """The options as Markdown: `setters` with their summaries, or the `keys` of lower layers."""
    lines = [option for option in table() if bool(option.summary) == (which == "setters")]
    if which == "setters":
        rows = [
            f"| `{option.accessor}` | {option.effect} | {option.summary.replace('|', '/')} |"
            for option in lines
        ]
        return "\n".join(
            ["", "| Option | Effect | What it is for |", "|---|---|---|", *rows, "", ""]
        )

    def row(option: OptionEffect) -> tuple[str, str]:
        """Its effect; of those without one, which are many, also the first letter of the name."""
        return option.effect, _key(option)[0] if option.effect == "recorded" else ""

    rows = [
        f"| {effect} | {', '.join(f'`{_key(option)}`' for option in options)} |"
        for (effect, _), options in groupby(sorted(lines, key=row), key=row)
    ]
    return "\n".join(["", "| Effect | Settings |", "|---|---|", *rows, "", ""])


def _key(option: OptionEffect) -> str:
    return option.accessor.removeprefix("_Popart.")


@contextlib.contextmanager
def _module(name: str, folder: Path, programs: list[str]) -> Iterator[tuple[types.ModuleType, str]]:
    """A module to run a page in, with `folder` as the working folder."""
    file = folder / f"{name}.py"
    file.write_text("".join(programs), encoding="utf-8")
    module = types.ModuleType(name)
    module.__file__ = str(file)
    before = Path.cwd()
    sys.modules[name] = module
    os.chdir(folder)
    linecache.checkcache(str(file))
    if "ipu" not in torch._dynamo.list_backends():  # the package is not installed
        torch._dynamo.register_backend(ipu, name="ipu")
    try:
        yield module, str(file)
    finally:
        os.chdir(before)
        del sys.modules[name]


def run(page: Path) -> tuple[str, str, dict[str, Any]]:
    """The text of a page, the text that it should have, and the names of its programs."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        new, names = refreshed(text, page.stem, Path(folder))
    torch._dynamo.reset()
    return text, new, names


def draw(pictures: list[str]) -> None:
    """Write pictures. A page runs once for all that are of it."""
    for page in {PICTURES[picture].page for picture in pictures}:
        names = run(FOLDER / f"{page}.md")[2] if page else {}
        for picture in pictures:
            if PICTURES[picture].page == page:
                write(picture, names)
                print(f"drew {picture}")


def main() -> None:
    os.environ["IPU_DYNAMO_ENGINE"] = "eager"
    if sys.argv[1:2] == ["pictures"]:
        draw(sys.argv[2:] or [*PICTURES])
        return
    for page in (page for page in PAGES if page.stem in (sys.argv[1:] or page.stem)):
        text, new, names = run(page)
        for picture in of_page(page.stem):
            write(picture, names)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"changed {page.name}")
    if "CONTRIBUTING" in (sys.argv[1:] or "CONTRIBUTING"):
        contributing = FOLDER.parent / "CONTRIBUTING.md"
        contributing.write_text(with_folders(contributing.read_text("utf-8")), encoding="utf-8")
    if "README" in (sys.argv[1:] or "README"):  # its figures are those of the pages
        refresh_readme()


if __name__ == "__main__":
    main()

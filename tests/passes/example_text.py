"""Read the lines of an example in a docstring, for `example_graphs.py`.

A line is Python, with `%` before the names of values. Marks and a source line may follow it:

    %y: f16[m,n] = aten.mm(%x: f16[m,k], %w)  in stage 1  # model.py:3 in forward: x @ self.w
"""

import ast
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

_SIZES = (4, 8, 12, 16, 20, 24)  # of letters, in the order in which types name them
_VALUE = "value_of_"  # Python's name of %y is value_of_y
_TYPE = r"[a-z]+\d+\[[^\]]*\]"
_INLINE = re.compile(rf"(?<=[(\[ ])({_VALUE}\w+): ({_TYPE}(?:\{{[\d,]*\}})?)(?=[,)\]])")
_STRING = r'"[^"]*"'
_STRIDES = re.compile(rf"({_TYPE})\{{([^}}]*)\}}")
_PLACE = re.compile(r"(.*\S) {2,}in (?:stage (\d+))?(?:, )?(forward|backward)?(?=  |$)(.*)")
_MARKS = re.compile(r"(.*\S) {2,}with (meta\[.*)")
_COMMENT = re.compile(r"(.*\S|) {2,}# (.*)")
_SOURCE = re.compile(r"(.+?):(\d+) in (\S+): (.+)")
_FUNCTION = re.compile(r"def (\w+)\((.*)\):")


@dataclass
class Line:
    """A line of an example.

    Args:
        text: the line as it is written.
        statements: its Python.
        stage, backward: the place of its operators, if it says so.
        marks: expressions of keys of meta, and of their values.
        stack_trace: of its operators.
    """

    text: str
    statements: list[ast.stmt] = field(default_factory=list)
    stage: int | None = None
    backward: bool | None = None
    marks: list[tuple[ast.expr, ast.expr]] = field(default_factory=list)
    stack_trace: str | None = None


@dataclass(frozen=True)
class Function:
    """Another graph of an example; `lines` declare its inputs first."""

    name: str
    lines: tuple["Line | Function", ...]


def letters(text: str) -> dict[str, int]:
    """The sizes of the letters in the types of a text."""
    found = [
        letter
        for type_ in re.findall(rf"{_TYPE}|Sym\[.\]", text)
        for letter in re.findall(r"\b[A-Za-z]\b", type_.partition("[")[2])
    ]
    return dict(zip(dict.fromkeys(found), _SIZES, strict=False))


def bare(name: str) -> str:
    """The name of a value in the example, of that in Python."""
    return name.removeprefix(_VALUE)


def is_value(name: str) -> bool:
    """Whether a name in Python is that of a value."""
    return name.startswith(_VALUE)


def read_lines(text: str) -> Iterator[Line | Function]:
    """The lines of a text, and the functions that it defines.

    Raises:
        ValueError: a line is not Python.
    """
    lines = deque(_logical(text))
    while lines:
        line = lines.popleft()
        if match := _FUNCTION.fullmatch(line):
            inputs = re.findall(rf"%\w+: {_TYPE}", match[2])
            block = [*takewhile(lambda below: below.startswith("    "), lines)]
            body = [lines.popleft()[4:] for _ in block]
            declared = [f"{one} = input" for one in inputs]
            yield Function(match[1], tuple(read_lines("\n".join([*declared, *body]))))
            continue
        try:
            yield _line(line.strip())
        except SyntaxError as error:
            raise ValueError(f"{line.strip()!r}: {error}") from error


def parse_line(line: str) -> Any:
    """The statement that a line is."""
    (statement,) = ast.parse(_python(line)).body
    return statement


def _line(text: str) -> Line:
    line, code = Line(text), text
    if match := _COMMENT.fullmatch(code):
        code = match[1]
        if source := _SOURCE.fullmatch(match[2]):
            line.stack_trace = '  File "{}", line {}, in {}\n    {}\n'.format(*source.groups())
    if match := _MARKS.fullmatch(code):
        code = match[1]
        for part in re.split(r" and (?=meta\[)", match[2]):
            mark = parse_line(part)
            line.marks.append((mark.targets[0].slice, mark.value))
    if match := _PLACE.fullmatch(code):
        code = match[1] + match[4]
        line.stage = int(match[2]) if match[2] else None
        line.backward = match[3] == "backward" if match[3] else None
    line.statements = ast.parse(_python(code)).body
    return line


def _logical(text: str) -> Iterator[str]:
    """The lines of a text; those within brackets are one."""
    whole = ""
    for line in text.splitlines():
        whole = f"{whole} {line.strip()}" if whole else line
        code = re.sub(_STRING, "", whole)
        if sum(map(code.count, "([{")) <= sum(map(code.count, ")]}")):
            if whole.strip():
                yield whole
            whole = ""


def _python(line: str) -> str:
    """A line as Python reads it."""
    strings = re.findall(_STRING, line)
    line = re.sub(_STRING, '"', line)
    line = re.sub(r"\b([a-z]+\d+)\[\]", r"\1[()]", line)
    line = re.sub(r"%(?=\w)", _VALUE, line)
    line = _INLINE.sub(r"(\1 := \2)", line)
    line = _STRIDES.sub(r"\1(\2)", line)
    return re.sub('"', lambda _: strings.pop(0), line)

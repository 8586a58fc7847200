"""Write a whole program as text, and read it back, for saved files and caches.

A program is read only from the exact text that it writes. So every part of a text has a meaning,
and all changes to a text are found.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from torch import Tensor

from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.control_flow import hold_bodies
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.program.ir.function import Function, body_of, make_function
from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.values import Variable
from ipu_dynamo.program.text.graph_text import FUNCTION, GraphForm
from ipu_dynamo.program.text.indented import LineError, outline, shortened
from ipu_dynamo.program.text.records import read_lines, write_lines

_FIRST, _LAST = "ipu_dynamo program, form 2", "end"
T = TypeVar("T")


def write_text(program: object) -> str:
    """`program` as text, one value, operator or instruction a line.

    Raises:
        ValueError: an operator has an argument that cannot be written.
    """
    return record_text(program, _FIRST)


def record_text(record: object, first: str, form: GraphForm = FUNCTION) -> str:
    """A dataclass as a text of its own, which begins with the line `first`."""
    return "\n".join([first, *write_lines(record, form), _LAST, ""])


def parse_text(text: str, kind: type[T], constants: Mapping[str, Tensor] | None = None) -> T:
    """Inverse of `write_text` for a program of class `kind`.

    Args:
        constants: tensors by name, to be compared with those that the program was made with.

    Raises:
        ValueError: `text` is no program as `write_text` writes it, or needs an operator that is not
            registered, or constants differ; the line is named.
    """
    result: T = read_record(text, kind, _FIRST, _Check(constants))
    return result


def read_record(
    text: str, kind: Any, first: str, check: Callable[[Any], None], form: GraphForm = FUNCTION
) -> Any:
    """Inverse of `record_text`.

    Args:
        first: its first line, such as `ipu_dynamo program, form 2`.
        check: as `read_lines` calls it.

    Raises:
        ValueError: `text` is not as `record_text` writes it; the line is named.
    """
    begin, *roots = outline(text)
    if begin.text != first:
        raise LineError(f"line 1: expected {first!r} and found {shortened(begin.text)!r}")
    if [line.text for line in roots[1:]] != [_LAST, ""]:
        number = text.count("\n") + 1 if len(roots) < 2 else roots[1].number
        level = first.partition(",")[0].split()[-1]
        raise LineError(f"line {number}: expected one {level}, {_LAST!r}, and nothing more")
    result = read_lines(roots[0], kind, check, form)
    if (written := record_text(result, first, form)) != text:
        pairs = enumerate(zip_longest(_lines(text), _lines(written)), 1)
        number, other = next((number, b) for number, (a, b) in pairs if a != b)
        raise LineError(f"line {number}: it is written as {shortened(str(other))!r}")
    return result


def line_error(text: str, record: object, problem: str) -> LineError:
    """The error that `record`, which was read from `text`, has a problem."""
    written = write_lines(record)[0]
    lines = [line.strip() for line in _lines(text)]
    return LineError(f"line {lines.index(written) + 1}: {problem}\n  {shortened(written)}")


@dataclass
class _Check:
    """Compare repeated facts of a text, and its constants with the given ones."""

    constants: Mapping[str, Tensor] | None
    functions: dict[str, Function] = field(default_factory=dict)

    def __call__(self, record: object) -> None:
        """Raise ValueError for a record that cannot be."""
        match record:
            case Function():
                self.function(record)
            case Call():
                self.call(record)
            case Variable(kind="constant") if self.constants is not None:
                self.constant(record, self.constants)

    def function(self, function: Function) -> None:
        hold_bodies(function.graph.graph, self.body)
        described = make_function(function.name, function.graph)
        if described.key != function.key:
            raise ValueError(f"its graph has the key {described.key}, so it was changed")
        if described != function:
            raise ValueError(f"its graph is another: {described}")
        if function.name in self.functions:
            raise ValueError(f"another function is called {function.name}")
        self.functions[function.name] = function

    def body(self, name: str) -> Body:
        """The function above that a loop or branch runs; a body is called by its digest."""
        if name not in self.functions:
            raise ValueError(f"no function above is called {name}")
        body = body_of(self.functions[name].graph)
        if body.name != name:
            raise ValueError(f"a loop or branch runs {name}, whose graph is that of {body.name}")
        return body

    def call(self, call: Call) -> None:
        function = self.functions.get(call.function)
        if function is None:
            raise ValueError(f"no function is called {call.function}")
        counts = len(call.arguments), len(call.results)
        if counts != (len(function.inputs), len(function.outputs)):
            raise ValueError(f"{counts[0]} arguments and {counts[1]} results do not fit {function}")

    def constant(self, variable: Variable, constants: Mapping[str, Tensor]) -> None:
        tensor = constants.get(variable.name)
        if tensor is None:
            raise ValueError(f"the constant {variable.name} is not given")
        actual = digest(tensor.to(variable.type.dtype))
        if actual != variable.digest:
            raise ValueError(f"the constant {variable.name} is given with the values {actual}")


def _lines(text: str) -> list[str]:
    return text.split("\n")

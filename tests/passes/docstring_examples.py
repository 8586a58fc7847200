"""Run the Before and After of a pass's docstring: build one, run the pass, compare with the other.

    With     matmuls=True
    Before   %y: f16[m,n] = aten.mm(%x: f16[m,k], %w: f16[k,n])
    After    %y = ipu.half_partials_matmul(%x, %w, 64)

- `With` has options of the pass that differ from those of the page. A docstring may have several
  Befores and Afters.
- A line is Python, with `%` before the names of values. Only operators run.
- A new name with a type is an input. Other inputs have a line: `parameter`, `buffer`, `constant`,
  `tangent` and the other kinds of a `Placeholder`, with its name if it is another one:
  `parameter("fc.weight", trainable=False)`. A tensor of the graph itself is an `attribute`.
- After has the inputs of Before. `del %w` removes one; a type there is its new type.
- Letters in types are sizes. The test binds them: all different, and multiples of 4. Arithmetic
  is allowed: `f32[m,n/2]`. `%s: Sym[s] = input` is a symbolic size, and `s` in Before that symbol.
- The arguments of an operator choose its overload. `...` as the last argument means any values.
  `%d[0]` takes a result out of several, `%x[:, 2:4]` is a slice. `torch.ops.ipu.end_block()` has
  no overload, as Dynamo records it.
- Names that are no operators are those of the pass's module and of its imports. Calls of those
  with numbers are computed: `offset(0, 8)`.
- `def body(%c: f32[n]):` begins another graph. Loops, branches and Dynamo's operators take it as
  `body`; a call `body(%x)` means its lines.
- After a pass that returns captures, the last line of After is the new model:
  `Directions(forward, backward)`, `Partitioned(...)` of such graphs, or
  `SplitCapture(capture, ...)`.
- `return (%y, gradient(%w, %g))` has the results with their kinds: a value, a gradient, a
  `mutation` or a `count`. Without it, Before returns the values that no operator reads, and After
  returns the same names as Before.
- `in stage 1, backward`, `with meta[...] = ... and meta[...] = ...` and a source line mark the
  operators of their line. A line with names of values only marks these: `%y, %z  in stage 1`.
  Another comment is for readers.
- `capture.loss = %y` sets a field of the capture or its report. `capture: Joint` means that After
  is another kind of capture.
- `the same` at the beginning of After repeats Before. `raise CompileError("words of it")` means
  that the pass refuses it.

`example_text.py` and `example_graphs.py` read the lines. Both sides become models. They are
compared in the text of `write_level`, up to the names of values.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import unified_diff
from functools import partial
from itertools import takewhile
from typing import Any

import pytest

from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.passes.levels import Model
from ipu_dynamo.passes.manager import PassManager
from tests.passes.example_graphs import ExampleGraph
from tests.passes.example_text import letters, parse_line

_WIDTH = 9  # of the column that names a section
_SECTION = re.compile(r"([A-Z][a-z]+) {2,}(?=\S)")
_DEFINED = re.compile(r" *%(\w+): ")
_SEVERAL = re.compile(r"^( *(?:%\w+: |return ))\((.*?),?\)(?= = |  |$)")  # a list or a tuple
_NAMED = re.compile(r'(%|\b(?:node|loss)=")(\w+)')


@dataclass(frozen=True)
class Example:
    """A Before and an After, with options of the pass that differ from those of the page."""

    before: str
    after: str
    options: str = ""


def examples(docstring: str) -> Iterator[Example]:
    """The examples of a docstring, in order."""
    sections: dict[str, list[str]] = {}
    name = ""
    for line in [*docstring.splitlines(), "Keeps    all"]:
        if match := _SECTION.match(line):
            if name == "After":
                texts = ("\n".join(sections.get(k, ())) for k in ("Before", "After", "With"))
                yield Example(*texts)
            name = match[1]
            sections[name] = []
        elif not line.startswith(" "):
            name = ""
        if name:
            sections[name].append(line[_WIDTH:])


def run_example(
    example: Example,
    step: Pass,
    names: Mapping[str, Any],
    run: Callable[[Pass, Model], Model] | None = None,
) -> None:
    """Run a pass on its Before, and assert that the result is its After.

    Args:
        step: as the page has it.
        names: of Python objects that the example may name, such as those of the pass's module.
        run: in place of the manager.

    Raises:
        ValueError: a line does not have the form of an example.
        AssertionError: the pass makes something else.
    """
    sizes = letters(example.before + example.after)
    before = ExampleGraph(step.level, names, sizes)
    if example.options:
        given = parse_line(f"dict({example.options})").value
        step = replace(step, **{k.arg: before.value(k.value) for k in given.keywords})
    before.read(example.before)
    model = before.model()
    run = run or (lambda step, model: PassManager("example", first=step.level).run([step], model))
    if example.after.startswith("raise "):
        raised = parse_line(example.after).exc
        kind, words = before.value(raised.func), before.value(raised.args[0])
        with pytest.raises(kind, match=re.escape(words)):
            run(step, model)
        return
    after = ExampleGraph(step.level, names, sizes, before)
    after.read(example.after)
    wanted = _canonical(after.model())
    made = _canonical(run(step, model))
    if made != wanted:
        lines = unified_diff(wanted, made, "After", step.name, lineterm="", n=99)
        raise AssertionError("\n".join([f"{step.name} does not make its After:", *lines]))


def _canonical(model: Model) -> list[str]:
    """The text of a model. The values of each graph are numbered, in their order."""
    lines = [line for line in write_level(model).splitlines() if not re.match(" *erased ", line)]
    numbers: dict[int, dict[str, str]] = {}  # by the indentation of a graph and of its roles
    written = []
    while lines:
        line = lines.pop()
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("return "):  # the last line of a graph
            graph = takewhile(bool, map(_DEFINED.match, reversed(lines)))
            names = [match[1] for match in graph]
            numbers[indent] = {name: str(n) for n, name in enumerate(reversed(names))}
        known = numbers.get(indent + 4 if "loss=" in line else indent, {})
        line = _SEVERAL.sub(r"\1[\2]", line)
        written.append(_NAMED.sub(partial(_numbered, known), line))
    return written[::-1]


def _numbered(numbers: Mapping[str, str], match: re.Match[str]) -> str:
    return f"{match[1]}{numbers.get(match[2], match[2])}"

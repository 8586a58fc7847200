"""Run the Before and After in the docstrings of passes on graphs."""

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import all_passes
from tests.passes.docstring_examples import examples, run_example

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
DIFFERS = (AssertionError, pytest.fail.Exception)  # the second one: no error is raised
PASSES = {step.name: step for step in all_passes() if step.level in ("traced", "joint")}


def checked(name, docstring=None, run=None):
    """Run the examples of a pass, or those of another docstring."""
    module = sys.modules[type(PASSES[name]).__module__]
    found = list(examples(module.__doc__ if docstring is None else docstring))
    assert found, f"the docstring of {name} has no Before and After"
    for example in found:
        run_example(example, PASSES[name], vars(module), run)


@pytest.mark.parametrize("name", PASSES)
def test_pass_makes_the_after_of_its_docstring(name):
    checked(name)


@pytest.mark.parametrize("name", PASSES)
def test_example_fails_where_the_pass_does_nothing(name):
    with pytest.raises(DIFFERS):
        checked(name, run=lambda step, model: model)


SUM = """
Before   %d = aten.detach(%x: f32[m,n])
         %y = aten.sub(%d, %z: f32[m,n])
After    """


@pytest.mark.parametrize(
    ("after", "right"),
    [
        ("%y = aten.sub(%x, %z)", True),
        ("%y: f32[m,n] = aten.sub(%x, %z)", True),
        ("%other = aten.sub(%x, %z); return (%other,)", True),
        ("%y = aten.sub(%z, %x)", False),
        ("%y = aten.add(%x, %z)", False),
        ("%y = aten.sub(%x, %z, alpha=2)", False),
        ("%y = aten.sub(%x, %z); return (%y, %x)", False),
        ("%y = aten.sub(%x, %z)  in stage 1", False),
        ("%y = aten.sub(%x, %z)  # model.py:3 in forward: x - z", False),
        ("%y = aten.sub(%x, %z)  # a comment", True),
        ("%y = aten.sub(%x, %z)\n         capture.training = True", False),
        ("%y = aten.sub(%x, %z)\n         %w: f32[n] = parameter", False),
        ('raise CompileError("any")', False),
    ],
)
def test_after_is_compared_whole(after, right):
    if right:
        checked("RemoveDetach", SUM + after)
    else:
        with pytest.raises(DIFFERS):
            checked("RemoveDetach", SUM + after)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("%y = aten.relu(%x)", "%x has neither a type nor a value"),
        ("%y: f32[n,m] = aten.relu(%x: f32[m,n])", r"%y is f32\[8,4\], and not f32\[4,8\]"),
        ("%y = aten.nothing(%x: f32[n])", "nothing"),
        ("%y = relu6(%x: f32[n])", "nothing is called relu6"),
        ('%y = aten.relu(%x: f32[n])  with meta["ipu.stag"] = 1', "no pass reads"),
        ("the relu of x", "invalid syntax"),
    ],
)
def test_example_that_is_not_in_the_form_is_refused(line, problem):
    with pytest.raises(ValueError, match=problem):
        checked("RemoveDetach", f"Before   {line}\nAfter    the same")


def test_pass_that_swaps_two_operands_fails_its_example():
    def swapped(step, model):
        result = PassManager("example", first="joint").run([step], model)
        (difference,) = result.graph.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
        difference.args = difference.args[::-1]
        return result

    checked("RemoveDetach")
    with pytest.raises(AssertionError, match="RemoveDetach does not make its After"):
        checked("RemoveDetach", run=swapped)


@pytest.fixture
def guide():
    """The code of the pass in the guide."""
    page = (ROOT / "docs" / "writing_a_pass.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]


def test_example_of_the_guide_runs(guide):
    names = {"__name__": "guide"}
    exec(guide, names)
    (example,) = examples(names["__doc__"])
    run_example(example, names["DropDoubleTransposes"](), names)


def test_example_of_contributing_runs():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r"^    (With .*?)\n\n", page, re.DOTALL | re.MULTILINE)
    checked("HalfPartials", dedent(f"    {example}"))

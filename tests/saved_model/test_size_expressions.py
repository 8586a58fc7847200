"""Check that sizes of real programs pass, and that nothing else does."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from ipu_dynamo.saved_model.gate.refusal import Refusal
from ipu_dynamo.saved_model.gate.size_expressions import checked
from tests.saved_model.programs import archive, members


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Conv2d(2, 2, 3, stride=3))

    def forward(self, x):
        y = self.layers(x)
        rows = nn.functional.interpolate(y, scale_factor=1.5)
        return rows, y.reshape(-1, y.shape[-1] * y.shape[-2]), torch.cat([x, x[1:]])


def texts(value):
    """All size expressions of a program."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from [part] if key == "expr_str" else texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)


def test_sizes_of_real_programs_pass_as_they_are():
    shapes = {0: Dim("n", min=3), 2: Dim("h", min=32), 3: Dim("w", min=32)}
    program = torch.export.export(
        Convolutions(), (torch.randn(4, 1, 40, 48),), dynamic_shapes=(shapes,)
    )
    parts = members(archive(program))
    (content,) = [parts[name] for name in parts if name.endswith("model.json")]
    found = set(texts(json.loads(content)))
    assert len(found) > 8
    assert {checked(text) for text in found} == found


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch x')",
        "Symbol('s0').__class__",
        "Symbol('s0'",
        "Symbol('os')",
        "Symbol('s0', integer=1)",
        "Symbol('s0', commutative=True)",
        'Symbol("s0")',
        "Integer(99999999999999999999)",
        "Integer(9223372036854775808)",
        "Integer(1) + Integer(2)",
        "Integer(1.5)",
        "Rational(1, 0)",
        "Float('1e9999', precision=53)",
        "Float('1.0', precision=100000)",
        "Lambda(Symbol('s0'), Integer(1))",
        "Function('f')(Integer(1))",
        "Pow(Integer(9), Integer(9999))",
        "Pow(Symbol('s0'), Symbol('s1'))",
        "Pow(Pow(Symbol('s0'), Integer(8)), Integer(8))",
        "LShift(Integer(1), Integer(64))",
        "LShift(Integer(1), Add(Symbol('s0'), Integer(1)))",
        f"Max({', '.join(f'Symbol({chr(39)}s{i}{chr(39)})' for i in range(17))})",
        "Add(" * 40 + "Integer(1)" + ")" * 40,
        "Add(Integer(1)" + ", Integer(1)" * 400 + ")",
        "Integer(1);",
        "lambda: 0",
        "",
        "true()",
    ],
)
def test_everything_else_is_refused(text):
    with pytest.raises(Refusal):
        checked(text)


def sums(count):
    return [f"Add(Symbol('s{i}'), Integer({i + 1}))" for i in range(count)]


@pytest.mark.parametrize("name", ["FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod"])
def test_what_is_divided_multiplies_out_to_few_terms(name):
    def product(count):
        return f"{name}(Mul({', '.join(sums(count))}), Symbol('s99'))"

    nested = "Symbol('s0')"
    for part in sums(20):
        nested = f"{name}({nested}, {part})"
    assert checked(product(6)) == product(6)
    for text in (product(9), nested, f"ModularIndexing({product(9)}, Integer(3), Integer(5))"):
        with pytest.raises(Refusal, match="terms"):
            checked(text)


SYMBOLS = st.integers(0, 99).map(lambda n: f"Symbol('s{n}', positive=True, integer=True)")
NUMBERS = st.integers(-(2**63), 2**63 - 1).map(lambda n: f"Integer({n})")
TREES = st.recursive(
    SYMBOLS | NUMBERS | st.just("true"),
    lambda parts: st.tuples(
        st.sampled_from(["Add", "Mul", "FloorDiv", "Mod", "Where", "Piecewise"]),
        st.lists(parts, min_size=1, max_size=3),
    ).map(lambda pair: f"{pair[0]}({', '.join(pair[1])})"),
    max_leaves=12,
)


@given(TREES)
def test_what_is_in_the_grammar_prints_back(text):
    assert checked(text) == text


@given(TREES, st.integers(0, 10**6), st.characters(exclude_categories=["Cs"]))
def test_a_changed_letter_is_refused_or_another_size(text, position, letter):
    position %= len(text)
    changed = text[:position] + letter + text[position + 1 :]
    try:
        printed = checked(changed)
    except Refusal:
        return
    assert printed.replace(" ", "") == changed.replace(" ", "")

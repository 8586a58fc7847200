"""Check that dataclasses read back as the types of their fields say, new ones like those here."""

from dataclasses import dataclass, field, fields, is_dataclass
from itertools import product
from typing import Any, Literal, Union, get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.program import Program, TensorType, Update
from ipu_dynamo.program.ir.update_rules import RULES, SGD
from ipu_dynamo.program.text.indented import outline
from ipu_dynamo.program.text.records import field_kinds, read_lines, write_lines


@dataclass(frozen=True, slots=True)
class Shape:
    """What stands in a line."""

    sides: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Round(Shape):
    radius: float = 1.0


@dataclass(frozen=True, slots=True)
class Leaf:
    mode: Literal["a", "b", 1]
    pair: tuple[int, str | None] = (0, None)
    many: tuple[tuple[str, ...], ...] = ()
    type: TensorType | None = None
    dtype: torch.dtype | None = None
    shape: Union[Shape, None] = None  # noqa: UP007
    shapes: tuple[str | Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """What has lines below it."""

    count: int
    below: tuple["Tree | Leaf", ...]
    more: tuple[Leaf, ...] = ()
    numbers: tuple[int, ...] = field(default_factory=tuple)


def read(text, kind, check=lambda record: None):
    (line,) = outline(text)
    return read_lines(line, kind, check)


names = st.text(max_size=3)
leaves = st.builds(
    Leaf,
    st.sampled_from(["a", "b", 1]),
    pair=st.tuples(st.integers(), st.none() | names),
    many=st.lists(st.lists(names, max_size=2).map(tuple), max_size=2).map(tuple),
    type=st.none() | st.just(TensorType(torch.float16, (2, 3))),
    dtype=st.none() | st.just(torch.bool),
    shape=st.none() | st.builds(Round, st.integers(), names, st.floats(allow_nan=False)),
    shapes=st.lists(names | st.builds(Round, st.integers()), max_size=2).map(tuple),
)
trees = st.recursive(
    leaves,
    lambda inner: st.builds(
        Tree,
        st.integers(),
        below=st.lists(inner, max_size=3).map(tuple),
        more=st.lists(leaves, max_size=2).map(tuple),
        numbers=st.lists(st.integers(), max_size=2).map(tuple),
    ),
    max_leaves=6,
)


@given(tree=trees)
def test_any_dataclass_reads_back(tree):
    lines = write_lines(tree)
    parsed = read("\n".join(lines), Tree | Leaf)
    assert parsed == tree
    assert write_lines(parsed) == lines


def test_lines_in_words():
    tree = Tree(2, (Leaf("a"), Tree(0, ())), numbers=(1,))
    assert write_lines(tree) == [
        "Tree(count=2, numbers=(1,))",
        "  below",
        '    Leaf(mode="a")',
        "    Tree(count=0)",
        "      below",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Tree(count=True)\n  below", "count is True, which is not int"),
        ("Tree(count=1)", "Tree needs below"),
        ("Tree(count=1, below=())\n  below", "below is there already"),
        ("Tree(count=1)\n  below\n  below", "below is there already"),
        ("Tree(count=1)\n  below\n    Shape(sides=1)", "Shape cannot stand here; Tree, Leaf can"),
        ("Tree(count=1)\n  numbers", "Tree has no part numbers"),
        ("Leaf(mode=True)", "mode is True, which is not"),
        ('Leaf(mode="a", pair=(1,))', "pair is (1,), which is not"),
        ('Leaf(mode="a", pair=[1, "a"])', "pair is "),
        ('Leaf(mode="a", shape=Shape(sides=1))', "Shape cannot stand here; Round can"),
        ('Leaf(mode="a", type=f32[2]{3})', "type is f32[2]{3}, which is not"),
        ('Leaf(mode="a", mode="b")', "mode is given twice"),
        ("Leaf", "Leaf is not a value"),
        ("7", "not a record"),
        ("Tree(count=1)\n   below", "indentation"),
        ("Tree(count=1)\n    below", "indentation"),
        ("Leaf(mode=\t1)", "nothing begins with '\\t'"),
    ],
)
def test_what_does_not_fit_the_fields_is_refused(text, message):
    with pytest.raises(ValueError, match=r"^line \d: ") as error:
        read(text, Tree | Leaf)
    assert message in str(error.value)


def test_checks_see_inner_records_first_and_name_the_line():
    seen = []
    read("Tree(count=1)\n  below\n    Tree(count=2)\n      below", Tree, seen.append)
    assert [tree.count for tree in seen] == [2, 1]

    def refuse(tree):
        if tree.count == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match=r"^line 3: two"):
        read("Tree(count=1)\n  below\n    Tree(count=2)\n      below", Tree, refuse)


def reachable(kind: Any) -> set[type]:
    """All dataclasses in the fields of a type."""
    found, waiting = set(), [kind]
    while waiting:
        one = waiting.pop()
        if is_dataclass(one) and one not in found:
            found.add(one)
            waiting += [*field_kinds(one).values(), *one.__subclasses__()]
        waiting += get_args(one)
    return found


def test_every_part_of_a_program_has_fields_that_read_back():
    parts = {part.__name__ for part in reachable(Program)}
    assert {"Function", "Variable", "Repeat", "Update", "Adam", "Output", "TensorType"} <= parts


def test_a_field_of_another_type_is_an_error_of_the_dataclass():
    @dataclass(frozen=True)
    class Odd:
        value: set[int]

    with pytest.raises(TypeError, match=r"Odd\.value is set"):
        write_lines(Odd({1}))


@pytest.mark.parametrize("kind", RULES)
def test_every_rule_reads_back(kind):
    drawn = {bool: (False, True), str: ("Adamax",), tuple[str, ...]: ((), ("lr", "eps"))}
    types = get_type_hints(RULES[kind])
    flags = [drawn.get(types[f.name], (None, torch.half)) for f in fields(RULES[kind])]
    for values in product(*flags):
        if RULES[kind] is SGD and values[1] and not values[0]:
            continue  # nesterov needs momentum
        named = dict(zip((f.name for f in fields(RULES[kind])), values, strict=True))
        update = Update(RULES[kind](**named), 0, 1, ("p",), ("g",), (("m", ("s",)),), 2.5, True)
        assert read("\n".join(write_lines(update)), Update) == update

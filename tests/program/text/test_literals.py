"""Check that values read back from their text, to the bit, and that nothing else is read."""

import math
import struct
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.ir.types import DTYPES, TensorType
from ipu_dynamo.program.text.literals import write
from ipu_dynamo.program.text.reader import Pairs, Reader, Record, read

TORCH = [
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
]
odd_strings = st.sampled_from(
    [
        "",
        '"',
        "\\",
        "\n",
        "\r\n",
        "\x00",
        "\x85",
        "\u2028",
        "\ud800",
        "# %x",
        "é",
        "\U0001f600",
        "a b",
    ]
)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([math.nan, -math.inf, math.inf, -0.0, 5e-324, 1e16, 1e-7, 0.1 + 0.2])
    | st.complex_numbers()
    | st.builds(complex, st.sampled_from([-0.0, math.nan, -math.inf]), st.just(-0.0))
    | st.text()
    | odd_strings
    | st.sampled_from(TORCH)
    | st.sampled_from(["cpu", "cuda", "cuda:1", "meta", "mps:0"]).map(torch.device)
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | odd_strings, inner, max_size=3)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=12,
)


def same(one, other):
    """Whether two values are of the same types and bits throughout."""
    if type(one) is not type(other):
        return False
    match one:
        case float():
            bits = [struct.pack("<d", math.nan if x != x else x) for x in (one, other)]
            return bits[0] == bits[1]
        case complex():
            return same(one.real, other.real) and same(one.imag, other.imag)
        case slice():
            parts = zip(*((s.start, s.stop, s.step) for s in (one, other)), strict=True)
            return all(same(a, b) for a, b in parts)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return one == other


@given(value=values)
def test_values_read_back(value):
    text = write(value)
    assert text.isascii()
    assert "\n" not in text
    assert same(read(text), value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (-0.0, "-0.0"),
        ([1, 1.0, True], "[1, 1.0, True]"),
        ((), "()"),
        ((1,), "(1,)"),
        (complex(-0.0, math.nan), "complex(-0.0, nan)"),
        (slice(None, -1), "slice(None, -1, None)"),
        ({"a": (None,)}, '{"a": (None,)}'),
        ("a\n\u2028", '"a\\n\\u2028"'),
        (torch.float32, "torch.float32"),
        (torch.channels_last, "torch.channels_last"),
        (torch.device("cuda", 1), 'device("cuda:1")'),
        (torch.Size([2, 3]), "(2, 3)"),
        (fx.immutable_collections.immutable_list([1]), "[1]"),
        (TensorType(torch.float16, (2,)), "f16[2]"),
    ],
)
def test_values_are_written_like_this(value, text):
    assert write(value) == text


@dataclass(frozen=True)
class Point:
    x: float
    y: tuple[float, ...] = (1,)
    label: str = ""


def test_dataclasses_are_written_without_defaults():
    assert write(Point(2.0)) == "Point(x=2.0)"
    assert write([Point(2, (1.0,))]) == "[Point(x=2, y=(1.0,))]"  # not the default, though equal
    assert read("[Point(x=2, y=(1.0,))]") == [Record("Point", {"x": 2, "y": (1.0,)})]


def test_a_dict_without_strings_reads_as_its_pairs():
    assert write({1: (2, "x")}) == '{1: (2, "x")}'
    assert read('{1: (2, "x")}') == Pairs(((1, (2, "x")),))


@pytest.mark.parametrize("value", [object(), {1}, torch.ones(1), b"", range(2), Point, ...])
def test_what_is_no_value_is_not_written(value):
    with pytest.raises(ValueError, match="has no text"):
        write([value])


@given(text=st.text() | st.text('()[]{}:=,."\\-+0123456789einfa_ %'))
def test_other_text_is_a_value_or_refused(text):
    try:
        value = read(text)
    except ValueError:
        return
    write(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a value and found the end of the line"),
        ("[1", "expected ] and found the end of the line"),
        ("1 2", "nothing may follow before 2"),
        ("os", "os is not a value"),
        ("torch.hub", "torch.hub is not a value"),
        ("f(", "expected a value and found the end of the line"),
        ("f(x=", "expected a value and found the end of the line"),
        ("f(1)", "these are no fields of f"),
        ("slice(1)", "these are no fields of slice"),
        ('device("ipu")', "not a device: 'ipu'"),
        ("{1 2}", "expected : and found 2"),
        ("%x", "nothing is called %x before this line"),
        ("$", "nothing begins with '$'"),
        ("a(b=1, 2)", "an argument without a name follows one with a name"),
        ("[" * 33, "more than 32 brackets in brackets"),
        ("1.2.3", "could not convert string to float: '1.2.3'"),
        ('"\\x"', "Invalid \\\\escape"),
    ],
)
def test_errors_say_what_was_expected(text, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(").replace("$", r"\$")):
        read(text)


def test_layouts_read_back():
    for tensor, text in (
        (torch.empty(4, 8), "f32[4,8]"),
        (torch.empty(8, 4).t(), "f32[4,8]{1,4}"),
        (torch.empty(()), "f32[]"),
        (torch.empty(0, 3), "f32[0,3]"),
        (torch.empty(1).expand(5), "f32[5]{0}"),
        (torch.empty(2, device="meta", dtype=torch.complex64), "c64[2]@meta"),
    ):
        layout = Layout.of(tensor)
        assert str(layout) == text
        assert Layout.parse(text) == layout
        made = layout.empty()
        assert (made.shape, made.stride()) == (tensor.shape, tensor.stride())
        assert (made.dtype, made.device) == (tensor.dtype, tensor.device)


@given(data=st.data())
def test_any_layout_reads_back(data):
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    stride = tuple(data.draw(st.integers(0, 99)) for _ in shape)
    dtype = data.draw(st.sampled_from([d for d in DTYPES.values() if "torch.q" not in repr(d)]))
    device = data.draw(st.sampled_from(["cpu", "cuda:0", "meta"]))
    layout = Layout(TensorType(dtype, shape), stride, device)
    assert Layout.parse(str(layout)) == layout
    assert read(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32[2]{1,1}", "1 sizes and 2 strides"),
        ("f32[99999999999,99999999999]", "too large"),
        ("f32[2]{9223372036854775807}", "too large"),
        ("f32[9223372036854775807]{0}", "too large"),
        ("quint8[2]", "quantized"),
        ("f32[2]@xla", "not a device"),
        ("onnx[2]", "not a tensor type"),
        ("f32[2,]", "not a tensor type"),
        ("f32", "not a tensor's type and layout"),
    ],
)
def test_impossible_layouts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


def test_reader_reads_nodes_by_name():
    node = fx.Graph().placeholder("x")
    reader = Reader("[%x, 1] (%x, y=2)", {"x": node})
    assert reader.value() == [node, 1]
    assert reader.arguments() == ((node,), {"y": 2})
    reader.end()

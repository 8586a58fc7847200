"""Check how tensors look as text."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.ops.tensor_text import TensorFormat, tensor_text

CURLY = {"separator": " ", "open_bracket": "{", "close_bracket": "}"}


@pytest.mark.parametrize(
    ("tensor", "settings", "text"),
    [
        (torch.tensor(1.5), {}, "1.500"),
        (torch.tensor(-3), {}, "-3"),
        (torch.tensor([1.0, -20.0]), CURLY, "{  1.00 -20.00}"),
        (torch.tensor([[1, 2], [3, 4]]), CURLY, "{\n {1 2}\n {3 4}\n}"),
        (torch.arange(4).view(2, 1, 2), CURLY, "{\n {\n  {0 1}\n }\n {\n  {2 3}\n }\n}"),
        (torch.tensor([True, False]), CURLY, "{ True False}"),
        (torch.zeros(0), {}, "()"),
        (torch.zeros(2, 0), {}, "(\n ()\n ()\n)"),
        (torch.arange(9), {"summarise_threshold": 8, "edge_items": 2}, "(0, 1, ..., 7, 8)"),
        (
            torch.arange(9),
            {"summarise_threshold": 9, "edge_items": 2},
            "(0, 1, 2, 3, 4, 5, 6, 7, 8)",
        ),
        (torch.arange(4), {"summarise_threshold": 1, "edge_items": 2}, "(0, 1, 2, 3)"),
        (torch.arange(3), {"summarise_threshold": 0}, "(0, 1, 2)"),
        (
            torch.arange(10).view(5, 2),
            {"summarise_threshold": 1, "edge_items": 1},
            "(\n (0, 1)\n ...\n (8, 9)\n)",
        ),
        (torch.arange(6), {"max_line_width": 8}, "(0, 1,\n  2, 3,\n  4, 5)"),
        (torch.arange(3), {"max_line_width": 1}, "(0,\n  1,\n  2)"),
        (torch.arange(3), {"max_line_width": 0}, "(0, 1, 2)"),
        (torch.tensor([1e-9, 2.0]), {}, "(1.000e-09, 2.000e+00)"),
        (torch.tensor([12345.0, 1.0]), {}, "(1.234e+04, 1.000e+00)"),
        (torch.tensor([12345.0, 1.0]), {"digits": 5}, "(12345,     1)"),
        (torch.tensor([1e-9, 2.0]), {"float_format": "fixed"}, "(0.000, 2.000)"),
        (torch.tensor([12.5, 2.0]), {"float_format": "scientific"}, "(1.250e+01, 2.000e+00)"),
        (torch.tensor([0.0123]), {}, "(0.01230)"),
        (torch.tensor([1.23e-5]), {}, "(1.230e-05)"),
        (torch.tensor([1.23e-5]), {"float_format": "fixed"}, "(0.00001230)"),
        (torch.tensor([1e-9, 2.0]), {"float_format": "none"}, "(1e-09,     2)"),
        (torch.tensor([float("nan"), -float("inf")]), {}, "( nan, -inf)"),
        (torch.tensor([0.5, 2.0], dtype=torch.bfloat16), {}, "(0.500, 2.000)"),
    ],
)
def test_layout(tensor, settings, text):
    assert tensor_text(tensor, TensorFormat(**settings)) == text


@given(st.data())
def test_no_line_is_wider_than_asked_for_where_an_element_fits(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    width = data.draw(st.integers(20, 60))
    form = TensorFormat(max_line_width=width, float_format="scientific")
    text = tensor_text(torch.randn(shape), form)
    assert max(map(len, text.splitlines())) <= width


@given(st.data())
def test_shows_every_number_in_its_place(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    form = data.draw(st.sampled_from(["auto", "scientific"]))
    tensor = torch.randn(shape, dtype=torch.float64) * 10 ** data.draw(st.floats(-9, 9))
    text = tensor_text(tensor, TensorFormat(0, digits=9, float_format=form, max_line_width=40))
    numbers = torch.tensor([float(one) for one in re.findall(r"[-+.e\d]+", text)])
    largest = tensor.abs().max().item()
    torch.testing.assert_close(numbers.double(), tensor.flatten(), rtol=0, atol=1e-6 * largest)


def test_of_a_large_tensor_only_the_edges_are_converted():
    tensor = torch.zeros(1).expand(1 << 20, 1 << 20)  # would take terabytes
    assert tensor_text(tensor, TensorFormat(edge_items=1)).count("\n") == 4


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("float_format", "hex"),
        ("digits", 0),
        ("edge_items", -1),
        ("max_line_width", 2.5),
        ("separator", 1),
    ],
)
def test_refuses_what_a_setting_cannot_be(setting, value):
    with pytest.raises(ValueError, match=setting):
        TensorFormat(**{setting: value})

"""Check what arguments, results and options become in a file, and that they come back."""

import collections
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import Options, Reason, SavedProgramError, register_named_tuple
from ipu_dynamo.saved.json_text import read_json, write_json
from ipu_dynamo.saved.options_json import read_options, write_options
from ipu_dynamo.saved.values import read_value, write_value
from ipu_dynamo.testing import options_for, placements_of

Point = collections.namedtuple("Point", "x y")
register_named_tuple(Point)
Other = collections.namedtuple("Other", "x")

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=3)
    | st.sampled_from([torch.float32, torch.int64])
)
KEYS = st.text(max_size=2) | st.integers(-3, 3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
        | st.builds(Point, inner, inner)
    ),
)


def with_tensors(value):
    """`value` with a tensor of each dtype in its place."""
    if isinstance(value, torch.dtype):
        return torch.zeros(2, dtype=value)
    if isinstance(value, dict):
        return type(value)((key, with_tensors(item)) for key, item in value.items())
    if isinstance(value, Point):
        return Point(*map(with_tensors, value))
    if isinstance(value, list | tuple):
        return type(value)(map(with_tensors, value))
    return value


@given(value=VALUES)
def test_values_come_back(value):
    written = read_json(write_json(write_value(with_tensors(value), "it")))
    found = read_value(written, lambda dtype: dtype)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, object()]}, r"result\['a'\]\[1\] is a builtins.object"),
        (Other(1), "register_named_tuple"),
        ({1.5: 2}, "key of type float"),
        (torch.Size([1]), "torch.Size"),
        ({"x": {1, 2}}, r"result\['x'\] is a builtins.set"),
    ],
)
def test_other_values_are_refused_with_their_path(value, where):
    with pytest.raises(SavedProgramError, match=where) as caught:
        write_value(value, "result")
    assert caught.value.reason is Reason.CANNOT_SAVE


def test_a_named_tuple_has_to_be_registered_where_it_is_read():
    written = write_value(Point(1, 2), "it") | {"named": "os.system"}
    with pytest.raises(SavedProgramError, match=r"'os\.system' is not registered"):
        read_value(written, lambda dtype: dtype)


@given(data=st.data())
def test_options_come_back(data):
    placement = data.draw(placements_of(["a", "b", "c"]))
    options = data.draw(options_for(placement=placement, training=data.draw(st.booleans())))
    assert read_options(read_json(write_json(write_options(options)))) == options


@pytest.mark.parametrize(
    "written",
    [
        {"replicas": 0},
        {"none": 1},
        {"strategy": {"kind": "x"}},
        {"strategy": {"stages": [{"blocks": "ab", "ipu": 0}]}},
        {"replica_groups": {"w": "group of 0 replicas"}},
        {"locations": {"weights": {"off_chip": 1}}},
        {"engine": {}},
        {"loss_scale": math.inf},
        [],
    ],
)
def test_options_are_checked(written):
    with pytest.raises(SavedProgramError) as caught:
        read_options(written)
    assert caught.value.reason is Reason.CONTENT


def test_only_changed_options_are_written():
    assert write_options(Options()) == {}
    assert write_options(Options(seed=3, devices="cpu")) == {"seed": 3, "devices": ["cpu"]}

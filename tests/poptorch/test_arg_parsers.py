"""Check taking structures apart and putting them together."""

import importlib.util
import sys
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from poptorch.arg_parsers import custom_parser, rebuilt, tensors_of

Pair = namedtuple("Pair", "first second")


class Batch:
    def __init__(self, data, label):
        self.data, self.label = data, label


class Labelled(Batch):
    pass


class BatchParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):  # noqa: N802
        yield struct.data
        yield struct.label

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(next(tensor_iterator), next(tensor_iterator))


@pytest.fixture
def parser():
    parser = BatchParser()
    poptorch.registerCustomArgParser(Batch, parser)
    yield parser
    poptorch.registerCustomArgParser(Batch, None)


leaves = st.integers(0, 9).map(torch.tensor)
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
    ),
)


@given(structures)
def test_rebuilding_is_the_inverse_of_taking_apart(structure):
    again = rebuilt(structure, tensors_of(structure))
    assert repr(again) == repr(structure)
    assert type(again) is type(structure)
    flat = list(tensors_of(structure))
    assert all(a is b for a, b in zip(tensors_of(again), flat, strict=True))


def test_a_registered_class_is_taken_apart(parser):
    one, two = torch.ones(1), torch.zeros(2)
    structure = {"batch": [Batch(one, two)], "rest": (two,)}
    assert [*map(id, tensors_of(structure))] == [id(one), id(two), id(two)]
    again = rebuilt(structure, iter([two, one, one]))
    assert (again["batch"][0].data, again["batch"][0].label) == (two, one)
    assert again["rest"] == (one,)


def test_the_look_up_prefers_the_class_itself_then_the_first_base(parser):
    own = BatchParser()
    assert custom_parser(Labelled) is parser
    poptorch.registerCustomArgParser(object, own)
    try:
        assert custom_parser(Labelled) is parser
        assert custom_parser(int) is own
        poptorch.registerCustomArgParser(Labelled, own)
        assert custom_parser(Labelled) is own
    finally:
        poptorch.registerCustomArgParser(object, None)
        poptorch.registerCustomArgParser(Labelled, None)
    assert custom_parser(int) is None
    poptorch.registerCustomArgParser(int, None)  # is no error


def test_a_parser_is_an_object_of_the_interface():
    with pytest.raises(poptorch.Error, match="parser of Batch must be"):
        poptorch.registerCustomArgParser(Batch, BatchParser)
    assert custom_parser(Batch) is None
    assert poptorch.registerGeometricCustomArgParsers() is None


@pytest.mark.parametrize("fails", [False, True])
def test_parsers_of_graph_batches_are_registered_where_their_package_is(
    tmp_path, monkeypatch, fails
):
    package = tmp_path / "poptorch_geometric"
    package.mkdir()
    (package / "__init__.py").touch()
    code = "import nothing_of_this_name" if fails else "calls = []"
    (package / "types.py").write_text(
        f"{code}\n\ndef registerCustomArgParsers():\n    calls.append(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    poptorch.registerGeometricCustomArgParsers()
    loaded = sys.modules.pop("poptorch_geometric.types", None)
    sys.modules.pop("poptorch_geometric", None)
    assert (loaded is None) == fails
    assert fails or loaded.calls == [1]


def test_nothing_is_registered_without_that_package():
    assert importlib.util.find_spec("poptorch_geometric") is None
    poptorch.registerGeometricCustomArgParsers()

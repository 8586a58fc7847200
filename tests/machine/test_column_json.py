"""Check that predictions read back from JSON, and that damaged ones are refused in one line."""

import json
from dataclasses import fields, is_dataclass
from functools import reduce
from operator import getitem
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.machine.column_json import read_columns, write_columns
from ipu_dynamo.machine.prediction import VERSION, Prediction

PLAIN = {
    int: st.integers(-(2**40), 2**40),
    float: st.floats(-1e12, 1e12),
    str: st.text(max_size=6),
    bool: st.booleans(),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type of a field."""
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=2).map(tuple)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(*map(values, get_args(kind)))
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind)})
    return PLAIN[kind]


def predictions() -> st.SearchStrategy[Prediction]:
    """Predictions of the right version, with numbers that need not make sense together."""
    return values(Prediction).map(
        lambda drawn: Prediction(
            **{f.name: getattr(drawn, f.name) for f in fields(Prediction)} | {"version": VERSION}
        )
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in JSON."""
    pairs: Any = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    return [path, *(p for key, part in pairs for p in places(part, (*path, key)))]


@given(prediction=predictions())
def test_json_reads_back_with_equal_bytes(prediction):
    content = write_columns(prediction)
    again = read_columns(content, Prediction, version=VERSION)
    assert again == prediction
    assert write_columns(again) == content


JUNK = (None, True, -1, 3, 10**4000, 1.5, "", "F", "\n", [], {}, [[]], {"": 1})


@given(prediction=predictions(), random=st.randoms(use_true_random=False))
def test_mutations_are_read_or_refused_in_one_line(prediction, random):
    for _ in range(50):
        value = json.loads(write_columns(prediction))
        *path, last = random.choice(places(value)[1:])
        parent = reduce(getitem, path, value)
        if random.random() < 0.5:
            parent[last] = random.choice(JUNK)
        else:
            del parent[last]
        text = json.dumps(value)
        length = random.choice((len(text), len(text), random.randrange(len(text))))
        try:
            Prediction.from_json(text[:length].encode())
        except ValueError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017  # some are read


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[" * 100_000, b'{"version": 1, "version": 1}', b'{"version": NaN}', b"\xff"],
)
def test_what_is_no_prediction_is_refused(content):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        Prediction.from_json(content)


def test_a_future_version_is_refused_by_its_number():
    with pytest.raises(ValueError, match=f"version {VERSION + 1}; this package reads {VERSION}"):
        Prediction.from_json(json.dumps({"version": VERSION + 1}).encode())

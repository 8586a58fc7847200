"""Check that made names are no names of the user's, and that no two are one."""

from hypothesis import example, given
from hypothesis import strategies as st

from ipu_dynamo.program.ir import made_names

WORDS = st.sampled_from(["a", "b", "weight", "grad", "new", "on1", "state", "group0"])
PATHS = st.lists(WORDS, min_size=1, max_size=3).map(".".join)
KEYS = st.lists(WORDS, min_size=1, max_size=2).map(".".join)
MAKERS = {
    "accumulator": (made_names.accumulator, st.tuples(PATHS)),
    "state": (made_names.state, st.tuples(PATHS, KEYS)),
    "copy": (made_names.on_ipu, st.tuples(PATHS, st.integers(0, 11))),
    "copy for the host": (made_names.returned, st.tuples(PATHS, st.integers(0, 11))),
    "value": (made_names.made_of, st.tuples(PATHS, st.sampled_from(["before", "new", "off"]))),
    "alone": (made_names.alone, st.tuples(PATHS)),
}
MADE = st.one_of(st.tuples(st.just(kind), arguments) for kind, (_, arguments) in MAKERS.items())


def name_of(made):
    kind, arguments = made
    return MAKERS[kind][0](*arguments)


@given(MADE, MADE, PATHS)
@example(("state", ("w", "grad")), ("accumulator", ("w",)), "w.grad")
@example(("state", ("w", "state.grad")), ("state", ("w", "grad")), "w.state.grad")
@example(("state", ("w", "new")), ("value", ("w", "new")), "w.new")
@example(("state", ("group0", "a")), ("alone", ("group0.a",)), "group0.a")
def test_no_two_names_are_one(one, other, users):
    assert made_names.is_made(name_of(one))
    assert not made_names.is_made(users)
    assert (name_of(one) == name_of(other)) == (one == other)


@given(PATHS, KEYS)
def test_files_have_paths_and_keys(path, key):
    assert made_names.in_files(made_names.state(path, key)) == f"{path}.{key}"
    assert made_names.in_files(made_names.alone(path)) == path
    assert made_names.in_files(path) == path


@given(PATHS, st.integers(0, 11))
def test_what_is_made_of_a_value_names_it(path, number):
    assert made_names.parameter_of(made_names.accumulator(path)) == path
    assert made_names.value_of(made_names.returned(path, number)) == path
    assert made_names.parameter_of(path) == made_names.value_of(path) == path


@given(st.text(".a'", max_size=6))
def test_any_text_becomes_a_name_of_the_users(text):
    assert not made_names.is_made(made_names.users(text))
    assert made_names.is_made(text) or made_names.users(text) == text

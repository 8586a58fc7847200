"""Check that compiling takes the same decisions as without shortcuts."""

import platform

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config, cpu_vec_isa, sizevars
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ipu_dynamo.runtime.engines.private.inductor import compile_artifact
from ipu_dynamo.runtime.engines.private.inductor_compile_time import (
    polynomial_indices_kept,
    vector_sets_tried,
)

pytestmark = pytest.mark.inductor
CAPABILITY = "ATEN_CPU_CAPABILITY"
VARIABLES = sympy.symbols("d0:3", integer=True, nonnegative=True)
TERMS = st.one_of(
    st.sampled_from(VARIABLES),
    st.builds(FloorDiv, st.sampled_from(VARIABLES), st.sampled_from([3, 16, 32])),
    st.builds(
        ModularIndexing,
        st.sampled_from(VARIABLES),
        st.sampled_from([1, 3, 16]),
        st.sampled_from([5, 16, 64]),
    ),
)
INDICES = st.lists(st.tuples(st.integers(1, 99), TERMS), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def without_setting(monkeypatch):
    monkeypatch.delenv(CAPABILITY, raising=False)


def test_the_same_set_is_chosen():
    with vector_sets_tried():
        chosen = cpu_vec_isa.pick_vec_isa()
    assert chosen == cpu_vec_isa.pick_vec_isa()


def test_only_one_set_is_tried():
    with vector_sets_tried():
        assert cpu_vec_isa.valid_vec_isa_list()[1:] == [] or platform.machine() != "x86_64"


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_set_that_the_user_names_is_chosen(monkeypatch, capability):
    with vector_sets_tried():
        cpu_vec_isa.pick_vec_isa()
    monkeypatch.setenv(CAPABILITY, capability)
    with vector_sets_tried():
        chosen = cpu_vec_isa.pick_vec_isa()
    assert chosen == cpu_vec_isa.pick_vec_isa()


def test_the_set_of_the_width_in_the_settings_is_chosen():
    with config.patch({"cpp.simdlen": 256}):
        with vector_sets_tried():
            chosen = cpu_vec_isa.pick_vec_isa()
        assert chosen == cpu_vec_isa.pick_vec_isa()


def test_polynomials_are_not_simplified(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sizevars, "simplify_index_in_vec_range", lambda index, *_: seen.append(index) or index
    )
    stride_at = sizevars.stride_at_vec_range.__wrapped__  # without its cache
    first, second, _ = VARIABLES
    with polynomial_indices_kept():
        assert stride_at(3 * first * second + second, second, 16) == 3 * first + 1
        assert seen == []
        quotient, relation = FloorDiv(first, 3), sympy.Ge(first, 3)
        stride_at(quotient, first, 16)
        sizevars.simplify_index_in_vec_range(relation, first, 16)
        assert seen == [quotient, relation]


def test_what_is_compiled_is_shortened(monkeypatch):
    before = cpu_vec_isa.valid_vec_isa_list, sizevars.simplify_index_in_vec_range
    seen = []

    def compile_for(*arguments, **settings):
        seen.extend([cpu_vec_isa.valid_vec_isa_list, sizevars.simplify_index_in_vec_range])
        raise ZeroDivisionError

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_for)
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    with pytest.raises(ZeroDivisionError):
        compile_artifact(graph, [torch.ones(3)], {}, 1)
    assert not set(seen) & set(before)
    assert before == (cpu_vec_isa.valid_vec_isa_list, sizevars.simplify_index_in_vec_range)


@given(INDICES, st.integers(-99, 99), st.sampled_from(VARIABLES))
def test_strides_are_the_same(parts, first, variable):
    index = first + sum(factor * term for factor, term in parts)
    stride_at = sizevars.stride_at_vec_range.__wrapped__  # without its cache
    expected = stride_at(index, variable, 16)
    with polynomial_indices_kept():
        assert stride_at(index, variable, 16) == expected

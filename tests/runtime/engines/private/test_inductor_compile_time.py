"""Check that compiling takes the same decisions as without shortcuts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import sizevars
from torch._inductor.cpu_vec_isa import VecISA
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ipu_dynamo.runtime.engines.private.inductor import lower_artifact
from ipu_dynamo.runtime.engines.private.inductor_compile_time import polynomial_indices_kept

pytestmark = pytest.mark.inductor
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
        polynomial = 3 * first + 1
        with ThreadPoolExecutor(1) as pool:  # another thread's compilation is not ours
            pool.submit(sizevars.simplify_index_in_vec_range, polynomial, first, 16).result()
        assert seen == [quotient, relation, polynomial]


def test_what_is_compiled_is_shortened(monkeypatch):
    before = VecISA.check_build, sizevars.simplify_index_in_vec_range
    seen = []

    def compile_for(*arguments, **settings):
        seen.extend([VecISA.check_build, sizevars.simplify_index_in_vec_range])
        raise ZeroDivisionError

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_for)
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    with pytest.raises(ZeroDivisionError):
        lower_artifact(graph, [torch.ones(3)], {}, 1)
    assert not set(seen) & set(before)
    assert before == (VecISA.check_build, sizevars.simplify_index_in_vec_range)


@given(INDICES, st.integers(-99, 99), st.sampled_from(VARIABLES))
def test_strides_are_the_same(parts, first, variable):
    index = first + sum(factor * term for factor, term in parts)
    stride_at = sizevars.stride_at_vec_range.__wrapped__  # without its cache
    expected = stride_at(index, variable, 16)
    with polynomial_indices_kept():
        assert stride_at(index, variable, 16) == expected

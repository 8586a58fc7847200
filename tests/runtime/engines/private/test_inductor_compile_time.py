"""Check that compiling takes the same decisions as without shortcuts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import compile_fx, sizevars, utils
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, post_grad
from torch._inductor.pattern_matcher import PatternMatcherPass, init_once_fakemode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import FloorDiv, Min, ModularIndexing

from ipu_dynamo.runtime.engines.private.inductor import lower_artifact
from ipu_dynamo.runtime.engines.private.inductor_compile_time import (
    attention_patterns_on_demand,
    dtype_rules_made_once,
    indices_shortened,
    templates_on_demand,
)

pytestmark = pytest.mark.inductor
VARIABLES = sympy.symbols("d0:3", integer=True, nonnegative=True)
QUOTIENTS = st.builds(FloorDiv, st.sampled_from(VARIABLES), st.sampled_from([2, 3, 16]))
TERMS = st.one_of(
    st.sampled_from(VARIABLES),
    st.builds(lambda quotient: Min(4, quotient + 1), QUOTIENTS),  # of average pools
    st.builds(FloorDiv, st.sampled_from(VARIABLES), st.sampled_from([3, 16, 32])),
    st.builds(
        ModularIndexing,
        st.sampled_from(VARIABLES),
        st.sampled_from([1, 3, 16]),
        st.sampled_from([5, 16, 64]),
    ),
)
INDICES = st.lists(st.tuples(st.integers(1, 99), TERMS), min_size=1, max_size=4)


def test_polynomials_and_other_terms_are_not_simplified(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sizevars, "simplify_index_in_vec_range", lambda index, *_: seen.append(index) or index
    )
    stride_at = sizevars.stride_at_vec_range.__wrapped__  # without its cache
    first, second, _ = VARIABLES
    with indices_shortened():
        assert stride_at(3 * first * second + second, second, 16) == 3 * first + 1
        assert seen == []
        quotient, relation = FloorDiv(first, 3), sympy.Ge(first, 3)
        stride_at(2 * FloorDiv(second, 3) + quotient + second, first, 16)
        assert stride_at(2 * FloorDiv(second, 3) + first, first, 16) == 1
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
    with indices_shortened():
        assert stride_at(index, variable, 16) == expected


def test_rules_of_dtypes_are_made_once(monkeypatch):
    rules = vars(DtypePropagationOpsHandler()).keys()
    made, original = [], DtypePropagationOpsHandler.__init__
    monkeypatch.setattr(
        DtypePropagationOpsHandler, "__init__", lambda self: made.append(1) or original(self)
    )
    with dtype_rules_made_once():
        handlers = [DtypePropagationOpsHandler() for _ in range(3)]
        assert len(made) == 1
        assert len(set(map(id, handlers))) == 1
        assert vars(handlers[0]).keys() == rules
        with ThreadPoolExecutor(1) as pool:  # another thread's compilation is not ours
            pool.submit(DtypePropagationOpsHandler).result()
        assert len(made) == 2
        (name, rule), *_ = utils.op_dtype_propagation_rules.items()
        monkeypatch.setitem(utils.op_dtype_propagation_rules, f"{name}_again", rule)
        DtypePropagationOpsHandler()
        assert len(made) == 3
    DtypePropagationOpsHandler()
    assert len(made) == 4
    vars(handlers[0]).pop(f"{name}_again")


def test_templates_are_compiled_when_they_are_rendered(monkeypatch):
    before = vars(KernelTemplate)["_template_from_string"]
    make = KernelTemplate._template_from_string
    seen = []
    counted = staticmethod(lambda source: seen.append(source) or make(source))
    monkeypatch.setattr(KernelTemplate, "_template_from_string", counted)
    with templates_on_demand():
        template = KernelTemplate._template_from_string("{{x}} and {{x}}")
        with ThreadPoolExecutor(1) as pool:  # another thread's is compiled
            other = pool.submit(KernelTemplate._template_from_string, "{{x}}").result()
    assert seen == ["{{x}}"]
    assert template
    assert template.render(x=1) == template.render(x=1) == "1 and 1"
    assert other.render(x=1) == "1"
    assert seen == ["{{x}}", "{{x}} and {{x}}"]
    monkeypatch.undo()
    assert vars(KernelTemplate)["_template_from_string"] is before


def test_patterns_of_attention_wait_for_a_batched_product(monkeypatch):
    registered = []
    monkeypatch.setattr(fuse_attention, "_sfdp_init", lambda *devices: registered.append(devices))
    cpu = torch.device("cpu")

    def run(function, *examples):
        compile_fx.joint_graph_passes(make_fx(function, tracing_mode="fake")(*examples), cpu)

    def product(x, y):
        return torch.bmm(x, y)

    x = torch.ones(2, 3, 3)
    joint_graph.lazy_init.cache_clear()
    try:
        with attention_patterns_on_demand():
            run(torch.exp, x)
            assert registered == []
            run(product, x, x)
            assert registered == [(cpu,)]
            joint_graph.lazy_init.cache_clear()
            run(torch.exp, x)
        run(torch.exp, x)  # somebody else's finds that they are missing
        assert registered == [(cpu,), (cpu,)]
        run(torch.exp, x)
        assert len(registered) == 2
    finally:
        joint_graph.lazy_init.cache_clear()


def test_patterns_of_attention_have_batched_products(monkeypatch):
    """And none ends with an operator that one registered after it ends with: order is no matter."""
    ends = []
    for register in (fuse_attention._sfdp_init, misc_patterns._misc_patterns_init):
        patterns = PatternMatcherPass()
        monkeypatch.setattr(joint_graph, "patterns", patterns)
        monkeypatch.setattr(post_grad, "pass_patterns", [PatternMatcherPass() for _ in range(3)])
        init_once_fakemode(register.__wrapped__)(torch.device("cpu"))
        ends.append(patterns.patterns)
    attention, others = ends
    entries = [entry for entries in attention.values() for entry in entries]
    assert len(entries) > 20
    assert all("aten.bmm.default" in str(entry.pattern) for entry in entries)
    assert others
    assert not attention.keys() & others.keys()

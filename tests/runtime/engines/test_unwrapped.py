"""Check when Inductor's code is called without the wrappers around it, and that results stay."""

import cProfile
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.ops.private.native import wrapped_code
from ipu_dynamo.program import make_function
from ipu_dynamo.runtime.engines.engines import EagerEngine, InductorEngine
from ipu_dynamo.testing import assert_close

pytestmark = pytest.mark.inductor


def stages(model, *inputs):
    """The stage of Inductor, and what eager makes of it."""
    graph = make_fx(model, tracing_mode="fake")(*inputs)
    function = make_function("f", graph)
    return InductorEngine().compile(function), EagerEngine().compile(function)


def wrappers_in(call) -> int:
    """How often `call` goes through PyTorch's wrapper."""
    count, code = 0, wrapped_code()

    def note(frame, event, value):
        nonlocal count
        count += event == "call" and frame.f_code is code

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_pure_code_is_called_directly_from_the_second_call_on():
    x = torch.randn(3, 4)
    stage, eager = stages(lambda x: (x.sin() * 2, x.cos().sum(0)), x)
    with torch.no_grad():
        assert_close(tuple(stage([x])), eager([x]))
        assert wrappers_in(lambda: stage([x])) == 0
        for _ in range(2):
            x = torch.randn(3, 4)
            assert_close(tuple(stage([x])), eager([x]))
        first, second = stage([x]), stage([x + 1])
    assert first[0].data_ptr() != second[0].data_ptr()


def test_a_profiler_goes_on_and_the_call_after_it_is_watched():
    x = torch.randn(3, 4)
    stage, eager = stages(lambda x: (x.sin() * 2,), x)
    with torch.no_grad():
        with cProfile.Profile() as profile:
            before = sys.getprofile()
            assert_close(tuple(stage([x])), eager([x]))
            assert sys.getprofile() is before
        assert any(entry.code is wrapped_code() for entry in profile.getstats())
        stage([x])
        assert wrappers_in(lambda: stage([x])) == 0


def test_wrappers_stay_where_gradients_are_recorded():
    x = torch.randn(3, 4)
    stage, eager = stages(lambda x, w: ((x @ w).relu(),), x, torch.randn(4, 2))
    weight = torch.randn(4, 2, requires_grad=True)
    for _ in range(3):
        assert_close(list(stage([x, weight])), [r.detach() for r in eager([x, weight])])
    assert wrappers_in(lambda: stage([x, weight])) == 1


def test_a_change_in_place_is_counted_each_time():
    total = torch.zeros(3)
    stage, _ = stages(lambda t, x: (t.add_(x.exp()), x * 2)[1:], total, torch.ones(3))
    before = total._version
    for count in range(1, 4):
        with torch.no_grad():
            stage([total, torch.zeros(3)])
        assert total.tolist() == [count] * 3
        assert total._version >= before + count


def test_an_alias_of_an_argument_stays_one():
    x = torch.randn(2, 3)
    stage, _ = stages(lambda x: (x.view(6), x.exp()), x)
    with torch.no_grad():
        for _ in range(3):
            assert stage([x])[0].data_ptr() == x.data_ptr()


def test_products_alone_are_not_compiled():
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    stage, eager = stages(lambda x, w: (x @ w.t(),), x, w)
    assert wrappers_in(lambda: stage([x, w])) == 0
    assert torch.equal(stage([x, w])[0], eager([x, w])[0])

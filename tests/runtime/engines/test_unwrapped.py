"""Check that Inductor's code is called without the wrappers around it, and does what they did."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.program import make_function
from ipu_dynamo.runtime.engines import compiled_stages
from ipu_dynamo.runtime.engines.engines import EagerEngine, InductorEngine
from ipu_dynamo.runtime.engines.private.inductor import _unwrapped
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.tune.artifact_store import CACHE_DIR
from tests.runtime.engines.stages import stage_of

pytestmark = pytest.mark.inductor
aten = torch.ops.aten


def stages(model, *inputs):
    """The stage of Inductor, and what eager makes of it."""
    function = make_function("f", make_fx(model, tracing_mode="fake")(*inputs))
    return stage_of(function, InductorEngine()), stage_of(function, EagerEngine())


def wrappers_in(call) -> int:
    """How often `call` goes through PyTorch's wrapper."""
    count, code = 0, CompiledFxGraph.__call__.__code__

    def note(frame, event, value):
        nonlocal count
        count += event == "call" and frame.f_code is code

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def add_through_a_view(total, x):
    total.view(6).add_(x.view(6).sin())
    return (x * 2,)


def change_two(total, x):
    total.copy_(x.sin())
    x.mul_(3.0)
    return (total * x,)


def the_changed_one(total, x):
    return total.add_(x.sin()), x.exp()


def the_same_twice(total, x):
    y = (x + total).sin()
    return y, y, y.sum()


def views_of_inputs(total, x):
    return x.view(6), total.t(), x.sin()


def inputs_themselves(total, x):
    return x, x.cos(), total


def another_layout(total, x):
    return torch.cat([x.t(), x.t()], 1).t(), total.t().contiguous().sin()


MODELS = [
    add_through_a_view,
    change_two,
    the_changed_one,
    the_same_twice,
    views_of_inputs,
    inputs_themselves,
    another_layout,
]


@pytest.mark.few(3)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_code_without_wrappers_computes_and_changes_what_eager_does(model, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    given = torch.zeros(2, 3), torch.randn(2, 3)
    for origin in ("compiler", "disk"):
        compiled_stages.forget()
        before = compiled_stages.origins[origin]
        stage, eager = stages(model, *given)
        assert compiled_stages.origins[origin] == before + 1
        for _ in range(2):
            ours, theirs = ([t.clone() for t in given] for _ in range(2))
            with torch.no_grad():
                results, expected = [], eager(list(theirs))
                assert wrappers_in(lambda r=results, s=stage, o=ours: r.extend(s(list(o)))) == 0
            torch.testing.assert_close(results, list(expected))
            assert [t.stride() for t in results] == [t.stride() for t in expected]
            torch.testing.assert_close(ours, theirs)
    compiled_stages.forget()


def test_a_graph_without_a_result_keeps_its_place():
    function = make_function("f", make_fx(lambda x: (x.sin(), x.cos()), tracing_mode="fake")(X))
    (output,) = function.graph.graph.find_nodes(op="output")
    output.args = ((output.args[0][0], None, output.args[0][1]),)
    function = make_function("f", function.graph)
    with torch.no_grad():
        first, none, second = stage_of(function, InductorEngine())([X])
    assert none is None
    torch.testing.assert_close((first, second), (X.sin(), X.cos()))


X = torch.randn(3, 4)


def test_results_are_new_in_every_call():
    stage, _ = stages(lambda x: (x.sin() * 2,), X)
    with torch.no_grad():
        first, second = stage([X]), stage([X + 1])
    assert first[0].data_ptr() != second[0].data_ptr()


def test_random_numbers_follow_the_generator():
    stage, eager = stages(lambda x: (aten.rand_like(x) + x,), X)
    results = []
    for run in (stage, eager):
        torch.manual_seed(3)
        with torch.no_grad():
            results.append([run([X])[0], run([X])[0]])
    assert_same_bits(results[0], results[1])


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


def test_wrappers_stay_where_the_code_returns_more_than_the_graph():
    code = SimpleNamespace(current_callable=len, output_strides=[("4", "1"), None])
    assert _unwrapped(sum, [code], 2).layouts == ((4, 1), None)
    assert _unwrapped(sum, [code], 2).run is len
    for graphs, results in (([code], 1), ([code, code], 2), ([], 2)):
        assert _unwrapped(sum, graphs, results).run is sum

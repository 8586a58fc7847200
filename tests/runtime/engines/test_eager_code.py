"""Check that directly called operators compute what the graph says."""

import torch
import torch.nn.functional as F
from hypothesis import given
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.runtime.engines.eager_code import eager_code
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.testing.graphs import aten_graphs


@given(case=aten_graphs())
def test_same_bits_as_the_graph(case):
    graph, inputs = case
    before = graph.code
    assert_same_bits(eager_code(graph.graph)([*inputs]), graph(*inputs))
    assert graph.code == before


def test_a_layer_is_one_call_with_the_same_bits():
    def model(x, weight, bias, wide):
        h = torch.addmm(bias, x, weight.t())
        return h, torch.addmm(wide, h, weight.t()), torch.addmm(bias, h, weight.t(), beta=2)

    inputs = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4), torch.randn(3, 4)
    graph = make_fx(model, tracing_mode="fake")(*inputs)
    with torch.profiler.profile() as profile:
        results = eager_code(graph.graph)(list(inputs))
    calls = [event.key for event in profile.key_averages()]
    assert calls.count("aten::linear") == 1
    assert_same_bits(results, model(*inputs))
    assert torch.equal(results[0], F.linear(*inputs[:3]))


def test_values_end_with_their_last_use():
    """Memory: a chain of operators holds two values at a time, not all; its argument is one."""
    alive, most = 0, 0

    class Counted(torch.Tensor):
        def __new__(cls):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return torch.Tensor._make_subclass(cls, torch.zeros(2))

        def __del__(self):
            nonlocal alive
            alive -= 1

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return Counted()

    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5):
        value = graph.call_function(torch.ops.aten.relu.default, (value,))
    graph.output((value,))
    eager_code(graph)([Counted()])
    assert most == 2

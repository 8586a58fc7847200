"""Check that directly called operators compute what the graph says."""

from itertools import islice, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch._subclasses.meta_utils import is_sparse_any
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

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


def permuted(tensor, order):
    """The same values in another layout."""
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).contiguous().permute(back)


def loss_gradient(name):
    def gradient(x, y):
        return torch.autograd.grad(getattr(F, name)(x, y), x)[0]

    return gradient, 2


OPERATORS = {
    "batch_norm": (lambda x: F.batch_norm(x, x.new_zeros(4), x.new_ones(4), training=True), 1),
    "copysign": (lambda x: torch.copysign(x, x.sum()), 1),
    "floor_divide": (lambda x, y: torch.floor_divide(x * 10, y), 2),
    "log_sigmoid": (F.logsigmoid, 1),
    "pow": (lambda x: torch.pow(2.0, x), 1),
    "xlogy": (lambda x, y: torch.xlogy(x.abs(), y.abs()), 2),
    **{name: loss_gradient(name) for name in ("mse_loss", "huber_loss", "smooth_l1_loss")},
}
ORDERS = ([2, 1, 0], [0, 2, 1], [1, 0, 2], [0, 1, 2])


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_the_layout_that_the_trace_says(name):
    """What a view behind them was traced for."""
    function, arguments = OPERATORS[name]
    differ = False
    for orders in product(ORDERS, repeat=arguments):
        inputs = [permuted(torch.randn(2, 4, 6), order).requires_grad_() for order in orders]
        graph = make_fx(function, tracing_mode="fake")(*inputs)
        (result,) = graph.graph.output_node().all_input_nodes
        found = eager_code(graph.graph)(list(inputs))
        expected = function(*inputs)
        assert torch.equal(found, expected)
        assert found.stride() == result.meta["val"].stride()
        differ |= found.stride() != expected.stride()
    assert differ  # operators on their own have another layout


@pytest.mark.slow
def test_every_operator_has_the_layout_that_the_trace_says():
    """On transposed arguments; 700 operators of 750 can be traced alone."""
    from tests.torch_compile.operators import OPERATORS as EVERY

    def turned(x):
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dim() < 2:
            return x
        order = list(range(x.dim()))[::-1]
        return permuted(x.detach(), order)

    checked, wrong = set(), []
    for name, info in EVERY.items():
        for sample in islice(info.sample_inputs("cpu", torch.float32), 6):
            given = tree_map(turned, (sample.input, sample.args, sample.kwargs))
            leaves, structure = tree_flatten(given)
            places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def call(*tensors, info=info, leaves=leaves, structure=structure, places=places):
                filled = list(leaves)
                for place, tensor in zip(places, tensors, strict=True):
                    filled[place] = tensor
                first, args, kwargs = tree_unflatten(filled, structure)
                return tree_leaves(info(first, *args, **kwargs))

            tensors = [leaves[place] for place in places]
            try:
                graph = make_fx(call, tracing_mode="fake")(*tensors)
                values = [node.meta.get("val") for node in graph.graph.nodes]
                if any(is_sparse_any(v) or free_symbols(v) for v in values):
                    continue  # no strides, or sizes that values decide
                results = eager_code(graph.graph)([t.clone() for t in tensors])
            except Exception:  # reads values, or has no fake kernel
                continue
            for node, found in zip(graph.graph.output_node().args[0], results, strict=True):
                if isinstance(found, torch.Tensor) and found.numel():
                    checked.add(name)
                    steps = zip(found.shape, found.stride(), node.meta["val"].stride(), strict=True)
                    if any(size > 1 and real != traced for size, real, traced in steps):
                        wrong.append((name, found.shape, found.stride(), node.meta["val"].stride()))
    assert not wrong
    assert len(checked) > 400

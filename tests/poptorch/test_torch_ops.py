"""Check what programs call as torch.ops.poptorch."""

import pytest
import torch
from torch import fx, nn

import poptorch

ops = torch.ops.poptorch


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


def scoped(model):
    """Open a scope for every submodule by hooks, as programs do."""
    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, n=name: ops.push_name_scope(f"at_{n}"))
            module.register_forward_hook(lambda *_: ops.pop_name_scope())
    return model


def names_of(model, x):
    options = poptorch.Options().disableModuleNamescope()
    executor = poptorch.inferenceModel(model, options)
    executor.compile(x)
    return executor.getTensorNames()


def test_hooks_name_the_operators_of_their_module():
    model, x = scoped(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))), torch.ones(1, 2)
    names = names_of(model, x)
    assert any(name.startswith("at_0/") for name in names), names
    assert any(name.startswith("at_1/at_1.0/Relu") for name in names), names


def test_a_scope_that_an_error_left_open_ends_with_its_trace():
    class Fails(nn.Module):
        def forward(self, x):
            ops.push_name_scope("left_open")
            raise KeyError

    with pytest.raises(KeyError):
        poptorch.inferenceModel(Fails())(torch.ones(1))
    names = names_of(scoped(nn.Sequential(nn.ReLU())), torch.ones(1))
    assert any(name.startswith("at_0/Relu") for name in names), names


def test_scopes_do_nothing_outside_a_trace():
    ops.pop_name_scope()
    model, x = scoped(nn.Sequential(nn.ReLU())), torch.tensor([-1.0, 1.0])
    assert torch.equal(model(x), x.relu())


def test_attributes_in_a_graph_change_no_value():
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    linear = next(node for node in graph.graph.nodes if node.op == "call_module")
    with graph.graph.inserting_before(linear):
        graph.graph.call_function(ops.set_attribute, ("__outline", "layer", "a"))
    with graph.graph.inserting_after(linear):
        graph.graph.call_function(ops.clear_attribute, ("__outline", "layer"))
    graph.recompile()
    x = torch.ones(1, 2)
    assert torch.equal(poptorch.inferenceModel(graph)(x), graph(x).detach())


def test_casts_have_a_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.1]))

        def forward(self, x):
            half = ops.internal_cast(self.weight * x, "FLOAT16")
            return half, poptorch.identity_loss(ops.internal_cast(half, "FLOAT"), "sum")

    model = Model()
    step = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=1.0))
    half, _ = step(torch.tensor([3.0]))
    assert torch.equal(half, torch.tensor([0.1 * 3]).half())
    torch.testing.assert_close(model.weight, nn.Parameter(torch.tensor([0.1 - 3.0])))


def test_a_cast_to_an_unknown_type_is_refused():
    with pytest.raises(poptorch.Error, match="internal_cast to 'FLOAT64'"):
        ops.internal_cast(torch.ones(1), "FLOAT64")

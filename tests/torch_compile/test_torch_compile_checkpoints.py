"""Check that checkpoints with random operators in them train as PyTorch's do, draw by draw."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu

BODIES = {
    "dropout": lambda h: F.dropout(torch.tanh(h), 0.5),
    "dropout of everything": lambda h: F.dropout(torch.tanh(h), 1.0),
    "dropout twice": lambda h: F.dropout(F.dropout(h, 0.2) @ h.T @ h, 0.4),
    "dropout of half": lambda h: F.dropout(torch.tanh(h).half(), 0.3).double(),
    "noise": lambda h: torch.tanh(h) * torch.rand_like(h) + torch.randn(4, 8),
    "bernoulli": lambda h: torch.tanh(h) * torch.bernoulli(torch.full_like(h, 0.3).float()),
    "rrelu": lambda h: F.rrelu(h, 0.1, 0.4, training=True),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3),
}


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(8, 8).double(), body

    def part(self, x):
        return self.body(self.layer(x))

    def forward(self, x):
        first = checkpoint(self.part, x, use_reentrant=False)
        return (first + 0.1 * checkpoint(self.part, first.view(4, 8), use_reentrant=False)).sum()


def step(model, backend, **kwargs):
    """Loss, gradients, and the next number of the generator."""
    own = copy.deepcopy(model)
    call = torch.compile(own, backend=backend, **kwargs)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    loss = call(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in own.parameters()), x.grad, torch.rand(1)]


@pytest.mark.few(4)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_trains_as_pytorch(body, engine):
    model = Model(body)
    torch.manual_seed(2)
    expected = step(model, "aot_eager")
    torch.manual_seed(2)
    found = step(model, ipu, options={"engine": engine})
    for one, other in zip(found, expected, strict=True):
        if engine == "eager":
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_the_mask_alone_is_kept():
    model = Model(BODIES["dropout"])
    step(model, ipu, options={"engine": "eager"})
    forward, backward = (program.functions[0] for program in ipu_dynamo.programs())
    names = [[str(node.target) for node in one.operators] for one in (forward, backward)]
    assert names[0].count("aten.native_dropout.default") == 2
    assert "aten.native_dropout.default" not in names[1]
    assert "aten.tanh.default" in names[1]


class Layers(nn.Module):
    """As `Model`, without checkpoints."""

    def __init__(self, body, budget=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body, self.budget = nn.Linear(8, 8).double(), body, budget

    def forward(self, x):
        if self.budget is None:
            return torch.tanh(self.body(torch.sigmoid(self.layer(x)))).sum()
        with torch.autograd.graph.region_activation_memory_budget(self.budget):
            return torch.tanh(self.body(torch.sigmoid(self.layer(x)))).sum()


@pytest.mark.parametrize(
    ("body", "budget"),
    [("dropout", 0.4), *((body, 0.0) for body in ("dropout", "noise", "rrelu", "attention"))],
)
def test_a_memory_budget_draws_the_same_numbers_in_backward(body, budget):
    model = Layers(BODIES[body])
    torch.manual_seed(2)
    expected = step(model, "aot_eager")
    torch.manual_seed(2)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        found = step(model, ipu, options={"engine": "eager"})
    assert all(map(torch.equal, found, expected))


def test_a_region_that_keeps_nothing_is_refused_where_it_draws():
    with pytest.raises(ipu_dynamo.CompileError, match=r"other random numbers[\s\S]*in <lambda>: "):
        step(Layers(BODIES["dropout"], 0.0), ipu, options={"engine": "eager"})

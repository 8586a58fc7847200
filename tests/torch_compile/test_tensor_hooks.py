"""Check hooks on tensors inside compiled functions: they are part of the backward pass."""

import pytest
import torch
from torch import nn

from ipu_dynamo import Block
from ipu_dynamo.torch_compile.backend import ipu

EAGER = {"engine": "eager"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        with Block(ipu_id=0):
            h = self.first(x)
            h.register_hook(lambda gradient: gradient * self.second.weight.sum(0).detach())
        with Block(ipu_id=1):
            y = self.second(h.tanh())
            y.register_hook(lambda gradient: gradient.clamp(max=0.5))
            return y


@pytest.mark.parametrize("options", [EAGER, EAGER | {"micro_batches": 5}])
def test_hooks_change_gradients_as_in_pytorch(options):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 3)
    gradients = []
    for call in (model, torch.compile(model, backend=ipu, fullgraph=True, options=options)):
        model.zero_grad()
        call(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_hook_that_looks_leaves_gradients_alone():
    def looked_at(x):
        y = x * 2
        y.register_hook(lambda gradient: None)
        return (y * y).sum()

    x = torch.randn(3, requires_grad=True)
    torch.compile(looked_at, backend=ipu, options=EAGER)(x).backward()
    assert torch.allclose(x.grad, 8 * x.detach())

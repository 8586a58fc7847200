"""Check that an update that fails half-way is an error of PopTorch, and can be made good."""

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.ops.updates.update_kernels import AdamKernel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.b(torch.tanh(self.a(x))), y)


def executor():
    torch.manual_seed(0)
    net = Net()
    groups = [{"params": net.a.parameters()}, {"params": net.b.parameters(), "lr": 0.2}]
    optimizer = poptorch.optim.AdamW(groups, lr=0.1)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)  # no fused step
    return net, optimizer, poptorch.trainingModel(net, options, optimizer)


def copied(state):
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


def test_a_checkpoint_makes_an_update_good_that_failed(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
    (net, optimizer, model), (other, _, unharmed) = executor(), executor()
    model(x, y), unharmed(x, y)
    weights, state = copied(dict(net.state_dict())), copied(optimizer.state_dict())
    real, calls = AdamKernel.__call__, []

    def fail(self, *args):
        calls.append(self)
        if len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(AdamKernel, "__call__", fail)
        with pytest.raises(poptorch.Error, match=r"may have written a part of %a\.weight"):
            model(x, y)
    with pytest.raises(poptorch.Error, match=r"may have written a part of %a\.weight"):
        model(x, y)
    assert all(map(torch.equal, net.state_dict().values(), weights.values()))  # no partial ones
    net.load_state_dict(weights)
    model.copyWeightsToDevice()
    optimizer.load_state_dict(state)
    assert torch.equal(model(x, y), unharmed(x, y))
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))

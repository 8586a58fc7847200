"""Check what a program makes of `torch.utils.checkpoint`, where it differs from plain PyTorch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_dynamo import compile_inference, compile_training

EAGER = {"engine": "eager"}
UNTRAINED = r"would train nothing within it \(.*test_checkpoints.py:\d+ in forward: .*reentrant="


class Checkpointed(nn.Module):
    """Two layers, each in a checkpoint of its own where `layers` names it."""

    def __init__(self, *layers, reentrant=True, nested=False):
        super().__init__()
        self.layers, self.reentrant, self.nested = layers, reentrant, nested
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x, y):
        for name in ("first", "second"):
            layer = getattr(self, name)
            if name not in self.layers:
                x = layer(x)
            elif self.nested:
                x = checkpoint(lambda xs, f=layer: f(xs[0]), (x,), use_reentrant=self.reentrant)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(x, y)


def trained(model, x, y):
    """Its weights when a program has trained a copy of it for a step, and that step's loss."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = compile_training(model, optimizer, EAGER)(x, y)
    return loss, model.state_dict()


def plain(model, x, y):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    return loss.detach(), model.state_dict()


BATCH = torch.arange(12.0).view(4, 3) / 10, torch.ones(4, 2)


@pytest.mark.parametrize(
    "model",
    [Checkpointed("first"), Checkpointed("second", nested=True)],  # arguments alone count
)
def test_a_checkpoint_that_plain_pytorch_would_not_train_is_trained_with_a_warning(model):
    with pytest.warns(UserWarning, match=UNTRAINED) as caught:
        compiled = trained(model, *BATCH)
    assert len([w for w in caught if "checkpoint" in str(w.message)]) == 1
    model.reentrant = False
    torch.testing.assert_close(compiled, plain(model, *BATCH))


def test_plain_pytorch_does_not_train_it():
    """If it should one day, the warning would be wrong."""
    model = Checkpointed("first")
    with pytest.warns(UserWarning, match="Gradients will be None"):
        _, after = plain(model, *BATCH)
    assert torch.equal(after["first.weight"], model.first.weight)
    assert not torch.equal(after["second.weight"], model.second.weight)


@pytest.mark.parametrize("layers", [("second",), ()])
def test_a_checkpoint_whose_input_needs_a_gradient_is_trained_as_in_plain_pytorch(layers):
    model = Checkpointed(*layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(trained(model, *BATCH), plain(model, *BATCH))


def test_inference_and_checkpoints_without_gradients_say_nothing():
    class Frozen(Checkpointed):
        def forward(self, x, y):
            with torch.no_grad():
                x = checkpoint(self.first, x, use_reentrant=True)
            return nn.functional.mse_loss(self.second(x), y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Checkpointed("first", "second")
        loss = compile_inference(model, EAGER)(*BATCH)
        frozen = Frozen()
        trained(frozen, *BATCH)
    with torch.no_grad(), pytest.warns(UserWarning, match="Gradients will be None"):
        torch.testing.assert_close(loss, model(*BATCH))

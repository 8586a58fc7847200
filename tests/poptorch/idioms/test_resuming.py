"""Stop a training and go on from its checkpoint, weights and optimiser, as long runs do."""

import pytest
import torch
from torch import nn

import poptorch

STEPS, ROWS, ACCUMULATION = 6, 3, 2
KINDS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1},
    "AdamW": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.02},
    "RMSprop": {"lr": 1e-2, "eps": 1e-4, "momentum": 0.3, "centered": True},
    "LAMB": {"lr": 1e-2, "weight_decay": 0.01},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.0), nn.Linear(7, 3)
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        scores = self.layers(x)
        return scores, self.loss(scores, y)


class Run:
    """A model, its optimiser and rates, and the executor that trains it."""

    def __init__(self, kind, checkpoint=None):
        torch.manual_seed(0 if checkpoint is None else 99)
        self.model = Net()
        options = poptorch.Options().outputMode(poptorch.OutputMode.All).replicationFactor(2)
        options.Training.gradientAccumulation(ACCUMULATION)
        self.optimizer = getattr(poptorch.optim, kind)(self.model.parameters(), **KINDS[kind])
        self.rates = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.rates.load_state_dict(checkpoint["rates"])
        self.training = poptorch.trainingModel(self.model, options, self.optimizer)

    def train(self, batches):
        losses = []
        for batch in batches:
            losses.append(self.training(*batch)[1])
            self.rates.step()
            self.training.setOptimizer(self.optimizer)
        return losses

    def checkpoint(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rates": self.rates.state_dict(),
            },
            path,
        )


def batches():
    rows = ROWS * ACCUMULATION * 2
    drawn = torch.Generator().manual_seed(4)
    return [
        (torch.randn(rows, 5, generator=drawn), torch.randint(3, (rows,), generator=drawn))
        for _ in range(STEPS)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_a_checkpoint_has_the_bits_of_not_stopping(kind, tmp_path):
    through = Run(kind)
    losses = through.train(batches())
    first = Run(kind)
    before = first.train(batches()[: STEPS // 2])
    first.checkpoint(tmp_path / "checkpoint.pt")
    first.training.destroy()
    again = Run(kind, torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    after = again.train(batches()[STEPS // 2 :])
    assert torch.equal(torch.stack(before + after), torch.stack(losses))
    for name, tensor in through.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name


def test_the_state_of_an_optimizer_of_pytorch_is_refused(tmp_path):
    """As in PopTorch; its groups alone are taken where the device's part is None."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(*batches()[0])[1].backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["rates"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8).state_dict()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded onto the IPU"):
        Run("AdamW", state)
    state["optimizer"] |= {"ipu_state": None, "ipu_param": None}
    run = Run("AdamW", state)
    assert run.optimizer.param_groups[0]["lr"] == 0.5
    assert run.train(batches()[:1])[0].isfinite().all()

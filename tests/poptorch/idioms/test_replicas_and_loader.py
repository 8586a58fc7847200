"""Train a convolutional network on replicas, from an asynchronous loader, as vision programs do."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import poptorch

MICRO, ITERATIONS, REPLICAS, ACCUMULATION = 2, 2, 2, 3
SAMPLES, EPOCHS = 60, 2  # two items of 24 samples, and 12 that are left over


class Pictures(Dataset):
    """Pictures and their classes, the same in every process."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        picture = torch.randn(3, 8, 8, generator=drawn)
        return picture, torch.tensor(index % 5)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(4, 8))
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).relu().mean((2, 3)))


class WithLoss(nn.Module):
    """What a training program wraps: scores for the metrics, and the loss."""

    def __init__(self, model):
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x, target=None):
        scores = self.model(x)
        return scores if target is None else (scores, self.loss(scores, target))


def parameters(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": decayed, "weight_decay": 1e-2},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def options():
    chosen = poptorch.Options().deviceIterations(ITERATIONS).replicationFactor(REPLICAS)
    chosen.Training.gradientAccumulation(ACCUMULATION)
    chosen.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    chosen.outputMode(poptorch.OutputMode.All).randomSeed(7)
    chosen.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    )
    return chosen


def plain(model, epochs):
    """Steps over the samples in the loader's order; the losses of all micro-batches."""
    optimizer = torch.optim.SGD(parameters(model), lr=0.2, momentum=0.9)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with_loss, losses = WithLoss(model), []
    for items in epochs:
        for pictures, classes in items:
            steps = zip(pictures.chunk(ITERATIONS), classes.chunk(ITERATIONS), strict=True)
            for x, y in steps:
                optimizer.zero_grad()
                parts = REPLICAS * ACCUMULATION
                for micro, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
                    _, loss = with_loss(micro, target)
                    (loss / parts).backward()
                    losses.append(loss.detach())
                optimizer.step()
        rates.step()
    return torch.stack(losses)


@pytest.mark.parametrize("mode", ["Async", "AsyncRebatched"])
def test_epochs_from_the_loader_are_those_of_a_plain_loop(mode):
    torch.manual_seed(0)
    model, expected = Network(), Network()
    expected.load_state_dict(model.state_dict())
    optimizer = poptorch.optim.SGD(parameters(model), lr=0.2, momentum=0.9, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    training = poptorch.trainingModel(WithLoss(model), options(), optimizer)
    loader = poptorch.DataLoader(
        options(),
        Pictures(),
        MICRO,
        shuffle=True,
        num_workers=2,
        drop_last=True,
        persistent_workers=True,
        mode=poptorch.DataLoaderMode[mode],
        rebatched_worker_size=5 if mode == "AsyncRebatched" else None,
        async_options={"early_preload": True, "load_indefinitely": True, "buffer_size": 3},
    )
    epochs, losses = [], []
    for _ in range(EPOCHS):
        items = []
        for pictures, classes in loader:
            items.append((pictures.clone(), classes.clone()))
            scores, loss = training(pictures, classes)
            assert scores.shape == (len(pictures), 5)
            losses.append(loss)
        epochs.append(items)
        rates.step()
        training.setOptimizer(optimizer)
    loader.terminate()
    assert [len(items) for items in epochs] == [SAMPLES // 24] * EPOCHS
    seen = torch.cat([classes for items in epochs for _, classes in items])
    assert len(seen) == 96
    torch.testing.assert_close(torch.cat(losses), plain(expected, epochs), rtol=1e-4, atol=1e-5)
    training.copyWeightsToHost()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    training.detachFromDevice()
    validation = poptorch.inferenceModel(model.eval(), poptorch.Options().deviceIterations(4))
    pictures = torch.randn(8, 3, 8, 8)
    torch.testing.assert_close(validation(pictures), expected(pictures), rtol=1e-4, atol=1e-5)

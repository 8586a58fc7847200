"""Average weights on the host, validate the average, and go back to the best ones, as many do."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import poptorch

STEPS, ROWS, SHARE = 5, 8, 0.8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(6))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        self.seen.mul_(0.9).add_(x.sum(0))
        scores = self.layers(x)
        return scores if y is None else (scores, self.loss(scores, y))


class Run:
    """A model, the average of its weights, and the weights with the smallest loss."""

    def __init__(self, model, train):
        self.model, self.train = model, train
        average = get_ema_multi_avg_fn(SHARE)
        self.average = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        self.smallest, self.best = float("inf"), {}

    def step(self, x, y):
        loss = float(self.train(x, y))
        self.average.update_parameters(self.model)
        if loss < self.smallest:
            self.smallest, self.best = loss, copy.deepcopy(self.model.state_dict())
        return loss


def test_the_average_and_the_way_back_are_those_of_a_plain_loop():
    torch.manual_seed(3)
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    executor = poptorch.trainingModel(
        model, poptorch.Options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )

    def train_plainly(x, y):
        optimizer.zero_grad()
        _, loss = plain(x, y)
        loss.backward()
        optimizer.step()
        return loss

    here, there = Run(model, lambda x, y: executor(x, y)[1]), Run(plain, train_plainly)
    batches = [(torch.randn(ROWS, 6), torch.randint(3, (ROWS,))) for _ in range(STEPS + 1)]
    for batch in batches[:-1]:
        torch.testing.assert_close(here.step(*batch), there.step(*batch), rtol=1e-4, atol=1e-5)
    expected = there.average.state_dict()
    for name, found in here.average.state_dict().items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5, msg=name)

    validation = poptorch.inferenceModel(here.average.module)
    x, y = batches[-1]
    torch.testing.assert_close(
        validation(x), there.average.module(x).detach(), rtol=1e-4, atol=1e-5
    )

    model.load_state_dict(here.best)
    executor.copyWeightsToDevice()
    plain.load_state_dict(there.best)
    torch.testing.assert_close(here.step(x, y), there.step(x, y), rtol=1e-4, atol=1e-5)
    for name, found in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], found, rtol=1e-4, atol=1e-5)

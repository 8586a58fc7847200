"""Time one training step of small models: what a user would run instead, and both doors."""

import copy
from collections.abc import Callable

import torch
from torch import nn

import ipu_dynamo
from benchmarks.measure import Step

ROWS, CLASSES = 32, 10


class WithLoss(nn.Module):
    """A classifier that returns its loss, the form that every contender trains."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.classifier(x), y)


def mlp() -> dict[str, Step]:
    """A perceptron of three layers, where the overhead of a call counts."""
    classifier = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )
    return _contenders(WithLoss(classifier), torch.randn(ROWS, 64))


def convolutional() -> dict[str, Step]:
    """A small convolutional network, where the arithmetic counts."""
    classifier = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, CLASSES),
    )
    return _contenders(WithLoss(classifier), torch.randn(ROWS, 1, 8, 8))


CASES: dict[str, Callable[[], dict[str, Step]]] = {"mlp": mlp, "convolutional": convolutional}


def _contenders(model: WithLoss, x: torch.Tensor) -> dict[str, Step]:
    """Make a step of each contender; each trains its own copy of `model` with SGD."""
    y = torch.randint(CLASSES, (len(x),))

    def sgd(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(of.parameters(), lr=0.01, momentum=0.9)

    def loop(compile_model: Callable[[nn.Module], Callable[..., torch.Tensor]]) -> Step:
        own = copy.deepcopy(model)
        optimizer, forward = sgd(own), compile_model(own)

        def step() -> None:
            optimizer.zero_grad()
            forward(x, y).backward()
            optimizer.step()

        return step

    own = copy.deepcopy(model)
    whole_step = ipu_dynamo.compile_training(own, sgd(own), ipu_dynamo.Options())
    return {
        "eager": loop(lambda module: module),
        "torch.compile, Inductor": loop(torch.compile),
        "torch.compile, ipu": loop(lambda module: torch.compile(module, backend="ipu")),
        "compile_training": lambda: whole_step(x, y),
    }

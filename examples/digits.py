"""Train a convolutional network on handwritten digits as a 4-stage pipeline of virtual IPUs.

The program is plain PopTorch. Beside it the same training runs in plain PyTorch and through
`torch.compile`, on the same batches, to compare weights, predictions and speed.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from tqdm import tqdm

import ipu_dynamo
import poptorch
from ipu_dynamo.runtime.engines.engines import make_engine

MICRO_BATCH = 8
ACCUMULATION = 8
ITERATIONS = 2
Step = Callable[[Tensor, Tensor], Tensor]


class Network(nn.Module):
    """Two convolutions and two linear layers; each begins a block on an IPU of its own.

    Input: images `[batch, 1, 8, 8]` from 0 to 1, and labels `[batch]` when training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.conv1(images))
        h = F.avg_pool2d(torch.tanh(self.conv2(h)), 2)
        h = torch.tanh(self.hidden(h.flatten(1)))
        scores: Tensor = self.output(h)
        return scores if labels is None else F.cross_entropy(scores, labels)


def pipelined(network: Network) -> Network:
    """Spread the network over four virtual IPUs."""
    for ipu, layer in enumerate([network.conv1, network.conv2, network.hidden, network.output]):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    return network


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,797 digits that come with scikit-learn: four fifths to train on, the rest held back."""
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32))[:, None] / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    train, held_back = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[held_back], labels[held_back]),
    )


def plain_step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """What a user would write in PyTorch for one call: the same micro-batches, the same updates."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = torch.zeros(())
        for group in range(ITERATIONS):
            optimizer.zero_grad()
            for index in range(group * ACCUMULATION, (group + 1) * ACCUMULATION):
                rows = slice(index * MICRO_BATCH, (index + 1) * MICRO_BATCH)
                loss = network(images[rows], labels[rows])
                (loss / ACCUMULATION).backward()
            optimizer.step()
        return loss.detach()

    return step


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Over all weight tensors, the largest max |difference| / max |value|."""
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def predictions(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = network(images)
    return scores.argmax(1)


def held_back_scores(network: Network, data: TensorDataset) -> Tensor:
    """The scores of all held-back digits, `[count, 10]`, from an inference program."""
    options = poptorch.Options().deviceIterations(4)
    model = poptorch.inferenceModel(network.eval(), options)
    images = data.tensors[0]
    rows = 4 * MICRO_BATCH
    padded = F.pad(images, (0, 0, 0, 0, 0, 0, 0, -len(images) % rows))
    parts = [model(part) for part in padded.split(rows)]
    return torch.cat(parts)[: len(images)]


def timed_call(step: Step, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Images per second of a call, and the loss of its last micro-batch."""
    begin = time.perf_counter()
    loss = step(images, labels)
    return len(labels) / (time.perf_counter() - begin), float(loss)


def main(epochs: int) -> dict[str, Any]:
    """Train, compare, print; return the printed figures, and the mean losses of epochs."""
    torch.manual_seed(0)
    train, held_back = load()
    network = Network()
    plain, compiled = copy.deepcopy(network), copy.deepcopy(network)

    options = poptorch.Options().deviceIterations(ITERATIONS)
    options.Training.gradientAccumulation(ACCUMULATION)
    loader = poptorch.DataLoader(options, train, batch_size=MICRO_BATCH, shuffle=True)
    optimizer = poptorch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model = poptorch.trainingModel(pipelined(network), options, optimizer)

    eager_step = plain_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    steps: dict[str, Step] = {"ipu_dynamo": model, "eager": eager_step}
    if make_engine("auto").name == "inductor":  # torch.compile needs a C++ compiler, too
        sgd = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
        steps["torch.compile"] = plain_step(torch.compile(compiled), sgd)
    rates: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [0.0] * epochs for name in steps}
    early = math.nan  # not measured before update 10
    begin = time.perf_counter()
    rows = MICRO_BATCH * ACCUMULATION * ITERATIONS
    model.compile(*(tensor[:rows] for tensor in train.tensors))
    print(ipu_dynamo.programs()[-1].short())
    for epoch in range(epochs):
        bar = tqdm(loader, desc=f"epoch {epoch + 1}")
        for index, (images, labels) in enumerate(bar):
            call = epoch * len(loader) + index
            for name, step in steps.items():
                if call < 2:  # the first one compiles, but for the program above
                    bar.set_postfix_str(f"first call of {name}" if call == 0 else "")
                rate, loss = timed_call(step, images, labels)
                losses[name][epoch] += loss / len(loader)
                if call > 0:
                    rates[name].append(rate)
            if (call + 1) * ITERATIONS == 10:
                early = largest_difference(network, plain)
    seconds = time.perf_counter() - begin

    images, labels = held_back.tensors
    expected = predictions(plain.eval(), images)
    found = held_back_scores(network, held_back).argmax(1)
    speed = {name: statistics.median(values) for name, values in rates.items()}
    figures = {
        "accuracy": float((found == labels).float().mean()),
        "agreement": float((found == expected).float().mean()),
        "difference_after_10_updates": early,
        "seconds": seconds,
        **speed,
        "losses": losses,
    }
    print(f"accuracy on {len(labels)} held-back digits: {figures['accuracy']:.2%}")
    print(f"predictions that plain PyTorch makes too:  {figures['agreement']:.2%}")
    print(f"weights after 10 updates differ by:        {early:.1e} of the largest value")
    for name, rate in speed.items():
        print(f"{name:<14} {rate:>8,.0f} images/s  {rate / speed['eager']:>5.2f} x eager")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    main(parser.parse_args().epochs)

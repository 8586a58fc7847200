"""Time training steps of small models: what a user would run instead, and both doors."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

import ipu_dynamo
from benchmarks.jax_peer import models as in_jax
from benchmarks.jax_peer.peer import Training, trained, with_jax
from benchmarks.measure import Maker, Step, clock
from benchmarks.products import products_alone
from ipu_dynamo.runtime.engines.replay.replay import Repetition, Replay
from ipu_dynamo.torch_compile.backend import ipu

CLASSES = 10


class WithLoss(nn.Module):
    """A classifier that returns its loss, the form that every contender trains."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.classifier = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.classifier(x), y)


def mlp() -> Mapping[str, Maker]:
    """A perceptron, where what surrounds the arithmetic counts."""
    return _contenders(_perceptron(), (64,), rows=32, steps=200, in_jax=in_jax.perceptron)


def mlp_784() -> Mapping[str, Maker]:
    """One whose weights and states fill a cache."""
    model = WithLoss(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    return _contenders(model, (784,), rows=16, steps=50, momentum=0.9, in_jax=in_jax.perceptron)


def mnist() -> Mapping[str, Maker]:
    """The network of PopTorch's first tutorial, on images of 28 x 28."""
    model = WithLoss(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 256),
        nn.ReLU(),
        nn.Linear(256, CLASSES),
    )
    return _contenders(model, (1, 28, 28), rows=8, steps=50, momentum=0.9, in_jax=in_jax.mnist)


def digits() -> Mapping[str, Maker]:
    """A small convolutional network, one step in a call."""
    model = WithLoss(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, CLASSES),
    )
    return _contenders(model, (1, 8, 8), rows=32, steps=1, momentum=0.9)


def overhead(steps: int = 1000) -> dict[str, float]:
    """What a device iteration takes beside its kernels and matmuls, in microseconds.

    Those are repeated on the same micro-batches, cut before; their rows come from main memory in
    both. One thread computes, since several would wait for each other after every operator.
    """
    torch.set_num_threads(1)
    model = _perceptron()
    x, y = torch.randn(32 * steps, 64), torch.randint(CLASSES, (32 * steps,))
    whole = _compiled(model, steps, 0.0)
    whole(x, y)
    executable = whole.executable
    assert executable.fused is not None
    now = executable.fused.prepare([[0.01, 0.0, 0.0, 0.0]]).function
    assert isinstance(now.replay, Replay), now.replay
    rows = (x.split(32), y.split(32))
    received = [rows[place] for place in now.places]
    numbers = [torch.tensor(0.01, dtype=torch.float64) for _ in now.fused.hyperparameters]
    sent = [[torch.empty(())] * steps for _ in now.fused.sent]

    def bare() -> float:
        assert isinstance(now.replay, Replay)
        made = Repetition(now.replay, now.homes, now.constants, numbers, received, sent, steps)
        start = time.perf_counter()
        made.advance(steps, 60.0)
        return time.perf_counter() - start

    with torch.no_grad():
        call = clock(lambda: whole(x, y))
        rounds = [(1e6 * call(1) / steps, 1e6 * bare() / steps) for _ in range(75)]
    return {
        "microseconds of a device iteration of the MLP, 1 thread": statistics.median(
            a for a, _ in rounds
        ),
        "microseconds of it beside what it calls": statistics.median(a - b for a, b in rounds),
    }


def _perceptron() -> WithLoss:
    return WithLoss(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def _sgd(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)


def _compiled(model: WithLoss, steps: int, momentum: float) -> ipu_dynamo.CompiledModel:
    own = copy.deepcopy(model)
    options = ipu_dynamo.Options(device_iterations=steps)
    return ipu_dynamo.compile_training(own, _sgd(own, momentum), options)


def _contenders(
    model: WithLoss,
    shape: tuple[int, ...],
    *,
    rows: int,
    steps: int,
    momentum: float = 0.0,
    in_jax: Callable[..., object] | None = None,
) -> Mapping[str, Maker]:
    """Each trains its own copy of `model`, `steps` steps in a call.

    Args:
        in_jax: the same loss in JAX, where JAX is a contender.
    """
    x, y = torch.randn(rows * steps, *shape), torch.randint(CLASSES, (rows * steps,))

    def loop(
        compile_model: Callable[[nn.Module], Callable[..., torch.Tensor]],
        *,
        optimizer_too: bool = False,
    ) -> Step:
        own = copy.deepcopy(model)
        optimizer, forward = _sgd(own, momentum), compile_model(own)
        update = torch.compile(optimizer.step) if optimizer_too else optimizer.step

        def step() -> None:
            for images, wanted in zip(x.split(rows), y.split(rows), strict=True):
                optimizer.zero_grad()
                forward(images, wanted).backward()
                update()

        return step

    def whole() -> Step:
        compiled = _compiled(model, steps, momentum)
        return lambda: compiled(x, y)

    contenders: dict[str, Maker] = {
        "eager": lambda: loop(lambda module: module),
        "torch.compile, Inductor": lambda: loop(torch.compile),
        "torch.compile, optimiser too": lambda: loop(torch.compile, optimizer_too=True),
        "torch.compile, ipu": lambda: loop(partial(torch.compile, backend=ipu)),
        "products alone": lambda: products_alone(_compiled(model, steps, momentum), x, y),
        "compile_training": whole,
    }
    if in_jax is None:
        return contenders
    work = Training(model, partial(_sgd, momentum=momentum), in_jax, (x, y), rows)
    return with_jax(contenders, partial(trained, work))

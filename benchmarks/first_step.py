"""Make the first step of a training in this process, and say what it took.

This file also runs in other checkouts, so it uses only the public names of `ipu_dynamo`.
"""

import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.jax_peer import trained
from benchmarks.work import Training, adamw, loop, sgd_with_momentum, whole


def first_step(training: str, who: str) -> dict[str, float]:
    """Wall and CPU seconds, those of compilers, and the loss; `import torch` is not counted."""
    torch.manual_seed(0)
    wall, cpu = time.perf_counter(), cpu_seconds()
    loss = STEPS[who](TRAININGS[training]())()
    seconds = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    python = {"compilers": compilers.ru_utime + compilers.ru_stime}
    return seconds | python | {"loss": float(loss.sum())}


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _digits() -> Training:
    stages = ("layers.0", "layers.2", "layers.6", "layers.8")
    inputs = torch.rand(64, 1, 8, 8), _labels(64)
    return Training(models.digits(), sgd_with_momentum, inputs, 8, 8, stages=stages)


def _other() -> Training:
    stages, inputs = ("layers.0", "layers.2", "layers.4"), (torch.rand(64, 48), _labels(64))
    return Training(models.perceptron(48, 80, 56, 10), adamw, inputs, 8, 8, stages=stages)


def _mlp() -> Training:
    inputs = torch.rand(32, 784), _labels(32)
    return Training(models.perceptron(784, 128, 10), sgd_with_momentum, inputs, 32)


def _language_model() -> Training:
    model, inputs = models.tied_language_model(4, 8192, 256, 128), _tokens(8192, 8, 128)
    return Training(model, adamw, inputs, 1, 8)


def _encoder(layers: int) -> Training:
    return Training(models.encoder(layers, 256), adamw, torch.randn(2, 4, 64, 256).unbind(), 4)


def _decoder() -> Training:
    return Training(models.decoder(2, 256, 64, 32, heads=4), adamw, _tokens(256, 4, 32), 4)


def _labels(rows: int) -> torch.Tensor:
    return torch.randint(models.CLASSES, (rows,))


def _tokens(words: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(words, shape)
    return tokens, tokens.roll(-1, 1)


TRAININGS: dict[str, Callable[[], Training]] = {
    "digits": _digits,
    "other": _other,
    "mlp": _mlp,
    "language_model": _language_model,
    "encoder_6": partial(_encoder, 6),
    "encoder_48": partial(_encoder, 48),
    "decoder": _decoder,
}


def _ours(work: Training, **options: Any) -> Callable[[], Any]:
    return whole(work, engine="inductor", **options)


def _jax(work: Training) -> Callable[[], Any]:
    """The work of a step as one function; the last number that it returns is the loss."""
    step = trained(work).step
    return lambda: step()[-1, -1]


STEPS: dict[str, Callable[[Training], Callable[[], Any]]] = {
    "this": _ours,
    "before": _ours,
    "not outlined": partial(_ours, outline=False),
    "kept program": lambda work: _ours(work, program_cache=os.environ["XDG_CACHE_HOME"]),
    "torch.compile": partial(
        loop, compile_model=partial(torch.compile, backend="ipu", fullgraph=True)
    ),
    "inductor": partial(loop, compile_model=torch.compile, optimizer_too=True),
    "jax": _jax,
}

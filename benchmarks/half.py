"""Time half precision: products with half partial sums, and a training step, on one core; and say
how far training in float16 leads from training in float64."""

import copy
from collections.abc import Callable
from functools import partial

import torch

import ipu_dynamo
from benchmarks.measure import Maker, Step
from benchmarks.pipeline import (
    ACCUMULATION,
    MICRO_BATCH,
    LanguageModel,
    eager_loop,
    random_tokens,
)
from ipu_dynamo.ops.precision import half_partial_sums as half_partials

M, K, N = 512, 4096, 512


def partial_sums() -> dict[str, Maker]:
    """A product and its two gradients: in float32, then of halves with half partial sums."""
    a, b, gradient = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    halves = (a.half(), b.half(), gradient.half())
    return {
        "float32": lambda: _products(torch.mm, a, b, gradient),
        **{
            f"half partials, chunk {chunk}": partial(_products, _chunked(chunk), *halves)
            for chunk in (16, 64, 128)
        },
    }


def training_step() -> dict[str, Maker]:
    """A step of a small language model in float16: 8 micro-batches, SGD."""
    model = LanguageModel().half()
    tokens, targets = random_tokens()
    return {
        "eager float16": lambda: eager_loop(model, tokens, targets),
        "ipu_dynamo float16": lambda: _compiled(model, tokens, targets),
    }


def distances(steps: int = 50) -> dict[str, float]:
    """Distances of weights trained in float16 from those trained in float64, a norm over all.

    All begin with the same halves, and make steps of two micro-batches with SGD.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start, rate = LanguageModel().half(), 0.1
    tokens, targets = (t[: 2 * MICRO_BATCH] for t in random_tokens())
    exact, eager, own = copy.deepcopy(start).double(), copy.deepcopy(start), copy.deepcopy(start)
    for model in (exact, eager):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            for rows, wanted in zip(tokens.chunk(2), targets.chunk(2), strict=True):
                (model(rows, wanted) / 2).backward()
            optimizer.step()
    optimizer = torch.optim.SGD(own.parameters(), lr=rate)
    step = ipu_dynamo.compile_training(own, optimizer, {"gradient_accumulation": 2})
    for _ in range(steps):
        step(tokens, targets)
    way, of_eager, of_own = (_distance(model, exact) for model in (start, eager, own))
    return {
        f"eager float16, off after {steps} steps, over the way of float64": of_eager / way,
        f"ipu_dynamo float16, off after {steps} steps, over the same way": of_own / way,
        RATIO: of_own / of_eager,
    }


RATIO = "ipu_dynamo float16's distance over eager float16's"

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _products(product: _Product, a: torch.Tensor, b: torch.Tensor, gradient: torch.Tensor) -> Step:
    def step() -> None:
        product(a, b)
        product(gradient, b.t())
        product(a.t(), gradient)

    return step


def _distance(model: LanguageModel, exact: LanguageModel) -> float:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    off = [(ours.detach().double() - theirs.detach()).norm() for ours, theirs in pairs]
    return torch.stack(off).norm().item()


def _chunked(chunk: int) -> _Product:
    return lambda a, b: half_partials.matmul(a, b, chunk)


def _compiled(model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor) -> Step:
    own = copy.deepcopy(model)
    options = ipu_dynamo.Options(gradient_accumulation=ACCUMULATION)
    step = ipu_dynamo.compile_training(own, torch.optim.SGD(own.parameters(), lr=0.01), options)
    return lambda: step(tokens, targets)

"""Time half precision: products with half partial sums, and a training step."""

import copy
from collections.abc import Callable
from functools import partial

import torch

import ipu_dynamo
from benchmarks.measure import Maker, Step
from benchmarks.pipeline import ACCUMULATION, LanguageModel, eager_loop, random_tokens
from ipu_dynamo.program import half_partials

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


_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _products(product: _Product, a: torch.Tensor, b: torch.Tensor, gradient: torch.Tensor) -> Step:
    def step() -> None:
        product(a, b)
        product(gradient, b.t())
        product(a.t(), gradient)

    return step


def _chunked(chunk: int) -> _Product:
    return lambda a, b: half_partials.matmul(a, b, chunk)


def _compiled(model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor) -> Step:
    own = copy.deepcopy(model)
    options = ipu_dynamo.Options(gradient_accumulation=ACCUMULATION)
    step = ipu_dynamo.compile_training(own, torch.optim.SGD(own.parameters(), lr=0.01), options)
    return lambda: step(tokens, targets)

"""Time a transformer encoder in inference, on one core and on all, beside its products alone."""

from functools import partial

import torch
from torch import nn

import ipu_dynamo
from benchmarks.jax_peer import models as in_jax
from benchmarks.jax_peer.peer import inferred, with_jax
from benchmarks.layers import Layer
from benchmarks.measure import Maker, Step
from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.private.native import onednn_pack

WIDTH, HEADS, LAYERS = 512, 8, 6
BATCH, LENGTH, ITERATIONS = 4, 128, 4


def one_core() -> dict[str, Maker]:
    """A batch of 4, and nothing but the matrix products of its layers."""
    model, x = _encoder(), torch.randn(BATCH, LENGTH, WIDTH)
    contenders: dict[str, Maker] = {
        "eager": lambda: _without_gradient(model, x),
        "torch.compile": lambda: _without_gradient(torch.compile(model), x),
        "products alone, torch": lambda: _products(model),
        "products alone, oneDNN": lambda: _packed_matmuls(model),
        "ipu_dynamo": lambda: _compiled(model, x),
        "ipu_dynamo, own weights": lambda: _compiled(model, x, own_weights=True),
    }
    function = partial(in_jax.encoder, layers=LAYERS, heads=HEADS)
    return with_jax(contenders, lambda: inferred(function, model, x))


def all_cores() -> dict[str, Maker]:
    """Four batches of 4 in one call: by intra-op threads, and as device iterations by workers."""
    model, x = _encoder(), torch.randn(ITERATIONS * BATCH, LENGTH, WIDTH)
    return {
        "eager": lambda: _without_gradient(model, x),
        "torch.compile": lambda: _without_gradient(torch.compile(model), x),
        "ipu_dynamo, intra-op": lambda: _compiled(model, x, own_weights=True),
        "ipu_dynamo": lambda: _compiled(model, x, own_weights=True, iterations=ITERATIONS),
    }


def _encoder() -> nn.Sequential:
    return nn.Sequential(*(Layer(WIDTH, HEADS) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)).eval()


def _without_gradient(model: nn.Module, x: torch.Tensor) -> Step:
    @torch.no_grad()
    def step() -> None:
        model(x)

    return step


def _compiled(
    model: nn.Module, x: torch.Tensor, *, own_weights: bool = False, iterations: int = 1
) -> Step:
    options = ipu_dynamo.Options(device_iterations=iterations)
    run = ipu_dynamo.compile_inference(model, options, own_weights=own_weights)
    return lambda: run(x)


def _products(model: nn.Sequential) -> Step:
    pairs = _products_of(model)
    return lambda: [torch.mm(a, weight.t()) for a, weight in pairs]


def _packed_matmuls(model: nn.Sequential) -> Step:
    packed = [(a, onednn_pack(weight, len(a))) for a, weight in _products_of(model)]
    return lambda: [onednn.packed(a, weight, None, "none") for a, weight in packed]


def _products_of(model: nn.Sequential) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each linear layer an input and its weight."""
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear)]
    return [(torch.randn(BATCH * LENGTH, w.shape[1]), w) for w in weights]

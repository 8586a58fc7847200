"""Time inferences: an encoder beside its products alone, saved programs, and a long loop."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import ipu_dynamo
from benchmarks.jax_peer import JAX, inferred, with_installed
from benchmarks.measure import Maker, Step
from benchmarks.models import Repeated, normed_encoder, perceptron
from benchmarks.products import products_alone
from benchmarks.work import inference, without_gradient
from ipu_dynamo.saved_model import convert, load, save

WIDTH, LAYERS = 512, 6
BATCH, LENGTH, ITERATIONS = 4, 128, 4
LOOP_WIDTH, ROWS, COUNT = 64, 16, 1000  # of the loop, whose body is a layer with tanh


def one_core() -> Mapping[str, Maker]:
    """A batch of 4, and nothing but the matrix products of its layers."""
    model, x = normed_encoder(LAYERS, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    contenders: Mapping[str, Maker] = {
        "eager": partial(without_gradient, model, x),
        "torch.compile": lambda: without_gradient(torch.compile(model), x),
        "products alone": lambda: products_alone(ipu_dynamo.compile_inference(model), x),
        "ipu_dynamo": partial(inference, model, x, own_weights=False),
        JAX: partial(inferred, model, x),
        "ipu_dynamo, own weights": partial(inference, model, x),
    }
    return with_installed(contenders)


def all_cores() -> dict[str, Maker]:
    """Four batches of 4 in one call: by intra-op threads, and as device iterations by workers."""
    model, x = normed_encoder(LAYERS, WIDTH), torch.randn(ITERATIONS * BATCH, LENGTH, WIDTH)
    return {
        "eager": partial(without_gradient, model, x),
        "torch.compile": lambda: without_gradient(torch.compile(model), x),
        "ipu_dynamo, intra-op": partial(inference, model, x),
        "ipu_dynamo": partial(inference, model, x, device_iterations=ITERATIONS),
    }


def saved_encoder() -> dict[str, Maker]:
    """Four micro-batches of 4 rows in a call, which is one step."""
    x = torch.randn(ITERATIONS * BATCH, LENGTH, WIDTH)
    return _of_saved(normed_encoder(LAYERS, WIDTH), x, BATCH)


def small_saved() -> dict[str, Maker]:
    """A network so small that a call's own work is what counts."""
    return _of_saved(perceptron(64, 128, 10).layers.eval(), torch.randn(32 * ITERATIONS, 64), 32)


def _of_saved(model: nn.Module, x: Tensor, batch_size: int) -> dict[str, Maker]:
    return {
        "eager": partial(without_gradient, model, x),
        "compile_inference": partial(inference, model, x, device_iterations=ITERATIONS),
        "embedded executable": lambda: _executable(model, x, batch_size),
    }


def _executable(model: nn.Module, x: Tensor, batch_size: int) -> Step:
    """Its first call compiles, as that of the others does; converting is done before."""
    folder = Path(tempfile.mkdtemp())
    rows = {0: Dim("rows", min=1, max=4096)}
    save(folder / "program", {"serving_default": (model, (x,), (rows,))})
    convert(
        folder / "program",
        folder / "converted",
        batch_size=batch_size,
        batch_per_step=ITERATIONS,
        int64_to_int32_conversion=True,
        embedded_runtime_save_config={
            "embedded_runtime_exec_cachedir": "cache",
            "runtime_api_timeout_us": 1,
        },
    )
    signature = load(folder / "converted")["serving_default"]
    (name,) = signature.inputs
    return lambda: signature(**{name: x})


def loop() -> Mapping[str, Maker]:
    """Inference, on one thread."""
    x, plain = torch.randn(ROWS, LOOP_WIDTH), Repeated(LOOP_WIDTH, COUNT)
    contenders: Mapping[str, Maker] = {
        "PyTorch": partial(without_gradient, plain, x),
        JAX: partial(inferred, plain, x),
        "ipu_dynamo": partial(inference, Repeated(LOOP_WIDTH, COUNT, as_operator=True), x),
    }
    return with_installed(contenders)

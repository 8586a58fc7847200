"""Time executables of saved programs beside `compile_inference`, and the reading of large ones."""

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import ipu_dynamo
from benchmarks.bert_graph import write_bert
from benchmarks.layers import Layer
from benchmarks.measure import Maker, Step
from ipu_dynamo.saved_model import convert, load, save
from ipu_dynamo.saved_model.tf_graphs.variable_table import VariableTable

WIDTH, HEADS, LAYERS = 512, 8, 6
BATCH, LENGTH, ITERATIONS = 4, 128, 4


def encoder() -> dict[str, Maker]:
    """Four micro-batches of 4 rows in a call, which is one step."""
    layers = (Layer(WIDTH, HEADS) for _ in range(LAYERS))
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH)).eval()
    return _contenders(model, torch.randn(ITERATIONS * BATCH, LENGTH, WIDTH), BATCH)


def small() -> dict[str, Maker]:
    """A network so small that a call's own work is what counts."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
    return _contenders(model, torch.randn(32 * ITERATIONS, 64), 32)


def _contenders(model: nn.Module, x: Tensor, batch_size: int) -> dict[str, Maker]:
    return {
        "eager": lambda: _eager(model, x),
        "compile_inference": lambda: _compiled(model, x),
        "embedded executable": lambda: _executable(model, x, batch_size),
    }


def _eager(model: nn.Module, x: Tensor) -> Step:
    @torch.no_grad()
    def step() -> None:
        model(x)

    return step


def _compiled(model: nn.Module, x: Tensor) -> Step:
    options = ipu_dynamo.Options(device_iterations=ITERATIONS)
    run = ipu_dynamo.compile_inference(model, options, own_weights=True)
    return lambda: run(x)


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


def reading() -> dict[str, float]:
    """What it takes to read and check the variables of a BERT-base, and to import its graph."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bert"
        small = folder.with_name("small")
        nbytes = _in_child(lambda: write_bert(folder))
        _in_child(lambda: write_bert(small, layers=1, words=100))
        load(small)["serving_default"].close()  # what is imported for it is no part of the model
        start = time.perf_counter()
        table = VariableTable(folder / "variables/variables")
        for key in table.names:
            table.tensor(key)
        read = time.perf_counter() - start
        del table
        start, before = time.perf_counter(), _resident()
        load(folder)["serving_default"].close()
        imported = time.perf_counter() - start
        return {
            "megabytes of variables": nbytes / 1e6,
            "seconds to read and check them": read,
            "seconds to import the graph with them": imported,
            "peak memory, times the variables": (_peak() - before) / nbytes,
        }


def _in_child(work: Callable[[], int]) -> int:
    """A number that work gives in a process of its own, whose memory is not this one's."""
    reading_end, writing_end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing_end, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing_end)
    os.waitpid(child, 0)
    with os.fdopen(reading_end) as pipe:
        return int(pipe.read())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

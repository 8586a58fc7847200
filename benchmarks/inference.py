"""Time inferences: an encoder beside its products alone, saved programs, and a long loop.

Some figures are about ours alone: the reading of large saved programs, and programs of loops.
"""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import ipu_dynamo
from benchmarks.child import fresh_child, in_fresh_child
from benchmarks.first_step import cpu_seconds
from benchmarks.jax_peer import inferred, with_jax
from benchmarks.measure import Maker, Step, clock
from benchmarks.models import Repeated, normed_encoder, perceptron
from benchmarks.peak_memory import peak_bytes
from benchmarks.work import inference, without_gradient
from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.private.native import onednn_pack
from ipu_dynamo.saved_model import convert, load, save
from ipu_dynamo.saved_model.tf_graphs.variable_table import VariableTable

WIDTH, LAYERS = 512, 6
BATCH, LENGTH, ITERATIONS = 4, 128, 4
LOOP_WIDTH, ROWS, COUNT = 64, 16, 1000  # of the loop, whose body is a layer with tanh
COUNTS = 10, 10_000  # iterations of the programs that are compared


def one_core() -> dict[str, Maker]:
    """A batch of 4, and nothing but the matrix products of its layers."""
    model, x = normed_encoder(LAYERS, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    contenders: dict[str, Maker] = {
        "eager": partial(without_gradient, model, x),
        "torch.compile": lambda: without_gradient(torch.compile(model), x),
        "products alone, torch": lambda: _products(model),
        "products alone, oneDNN": lambda: _packed_matmuls(model),
        "ipu_dynamo": partial(inference, model, x, own_weights=False),
        "ipu_dynamo, own weights": partial(inference, model, x),
    }
    return with_jax(contenders, partial(inferred, model, x))


def all_cores() -> dict[str, Maker]:
    """Four batches of 4 in one call: by intra-op threads, and as device iterations by workers."""
    model, x = normed_encoder(LAYERS, WIDTH), torch.randn(ITERATIONS * BATCH, LENGTH, WIDTH)
    return {
        "eager": partial(without_gradient, model, x),
        "torch.compile": lambda: without_gradient(torch.compile(model), x),
        "ipu_dynamo, intra-op": partial(inference, model, x),
        "ipu_dynamo": partial(inference, model, x, device_iterations=ITERATIONS),
    }


def _products(model: nn.Sequential) -> Step:
    pairs = _products_of(model)
    return lambda: [torch.mm(a, weight.t()) for a, weight in pairs]


def _packed_matmuls(model: nn.Sequential) -> Step:
    packed = [(a, onednn_pack(weight, len(a))) for a, weight in _products_of(model)]
    return lambda: [onednn.packed(a, weight, None, "none") for a, weight in packed]


def _products_of(model: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """For each linear layer an input and its weight."""
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear)]
    return [(torch.randn(BATCH * LENGTH, w.shape[1]), w) for w in weights]


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


def reading() -> dict[str, float]:
    """Time reading and checking the variables of a BERT-base, and importing its graph."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bert"
        small = folder.with_name("small")
        # in a process of its own, whose memory is not this one's
        with fresh_child() as child:
            nbytes = child.call("benchmarks.bert_graph:write_bert", str(folder))
            child.call("benchmarks.bert_graph:write_bert", str(small), 1, 100)
        load(small)["serving_default"].close()  # its imports are no part of the model
        read = clock(lambda: _read_variables(folder / "variables/variables"))(1)
        spent = clock(lambda: load(folder)["serving_default"].close())
        imported: list[float] = []
        peak = peak_bytes(lambda: imported.append(spent(1)))
        return {
            "megabytes of variables": nbytes / 1e6,
            "seconds to read and check them": read,
            "seconds to import the graph with them": imported[0],
            "peak memory, times the variables": peak / nbytes,
        }


def _read_variables(prefix: Path) -> None:
    table = VariableTable(prefix)
    for key in table.names:
        table.tensor(key)


def loop() -> Mapping[str, Maker]:
    """Inference, on one thread."""
    x, plain = torch.randn(ROWS, LOOP_WIDTH), Repeated(LOOP_WIDTH, COUNT)
    both: dict[str, Maker] = {
        "PyTorch": partial(without_gradient, plain, x),
        "ipu_dynamo": partial(inference, Repeated(LOOP_WIDTH, COUNT, as_operator=True), x),
    }
    return with_jax(both, partial(inferred, plain, x))


def loop_programs() -> dict[str, float]:
    """The size of programs, and the processor's seconds to compile them, with nothing compiled."""
    short, long = (
        in_fresh_child("benchmarks.inference:compiled_loop", count, OMP_NUM_THREADS="1")
        for count in COUNTS
    )
    return {
        f"{COUNTS[0]} iterations, characters": short["characters"],
        f"{COUNTS[1]} iterations, characters": long["characters"],
        f"{COUNTS[0]} iterations, s to compile": short["seconds"],
        f"{COUNTS[1]} iterations, times that": long["seconds"] / short["seconds"],
    }


def compiled_loop(count: int) -> dict[str, float]:
    """Compile a loop in this process: the size of its program, and the seconds."""
    run = ipu_dynamo.compile_inference(Repeated(LOOP_WIDTH, count, as_operator=True))
    start = cpu_seconds()
    run.compile(torch.randn(ROWS, LOOP_WIDTH))
    seconds = cpu_seconds() - start
    return {"characters": len(run.program.text()), "seconds": seconds}

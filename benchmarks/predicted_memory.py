"""Compare the memory that `inspect` says a step needs at its peak with what the system measures.

Usage: python -m benchmarks.predicted_memory [--rounds N] [NAME ...]

The second step of models of some hundred megabytes, whose code comes from the cache, measured as
`benchmarks.peak_memory` does. Both figures are above what is held between steps: variables and the
inputs of the call.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from benchmarks.child import Child
from benchmarks.models import Apply, Layer, WithLoss
from benchmarks.peak_memory import THRESHOLD, peak_bytes
from benchmarks.work import Training, adamw, program, sgd, sgd_with_momentum

MIB = 2**20


def perceptron() -> Training:
    """24 layers of width 512 on 4096 rows."""
    layers = [m for _ in range(24) for m in (nn.Linear(512, 512), nn.GELU())]
    inputs = torch.randn(2, 4096, 512).unbind()
    return Training(WithLoss(*layers, loss=F.mse_loss), sgd, inputs, 4096)


def transformer() -> Training:
    """8 layers of width 256 on 8 x 256 tokens."""
    layers = [Layer(256) for _ in range(8)]
    inputs = torch.randn(2, 8, 256, 256).unbind()
    return Training(WithLoss(*layers, loss=F.mse_loss), adamw, inputs, 8)


def images() -> Training:
    """Convolutions with batch norms on 16 images of 96 x 96."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    inputs = torch.randn(16, 3, 96, 96), torch.randint(10, (16,))
    return Training(WithLoss(*layers), sgd_with_momentum, inputs, 16)


def language_model() -> Training:
    """Two layers with a head of 32,000 words on 4 x 256 tokens."""
    layers = [nn.Embedding(32000, 128), Layer(128), Layer(128), nn.Linear(128, 32000)]
    tokens = torch.randint(32000, (4, 256))
    return Training(WithLoss(*layers), adamw, (tokens, tokens.roll(-1, 1)), 4)


def pipeline() -> Training:
    """12 layers of width 512 in three stages, 6 micro-batches of 2048 rows, nothing recomputed."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(12)]
    inputs = torch.randn(2, 6 * 2048, 512).unbind()
    stages = "layers.0", "layers.4", "layers.8"
    model = WithLoss(*layers, loss=F.mse_loss)
    return Training(model, sgd, inputs, 2048, accumulation=6, stages=stages)


def sums() -> Training:
    """Exponentials and sums along rows of 2048 x 8192 numbers."""
    layers = (nn.Linear(64, 8192), Apply(lambda x: x.exp().cumsum(1)), nn.Softmax(1))
    inputs = torch.randn(2048, 64), torch.randn(2048, 8192)
    return Training(WithLoss(*layers, loss=F.mse_loss), sgd, inputs, 2048)


CASES: Mapping[str, Callable[[], Training]] = {
    "perceptron": perceptron,
    "transformer": transformer,
    "images": images,
    "language_model": language_model,
    "pipeline": pipeline,
    "sums": sums,
}


def figures(name: str) -> dict[str, float]:
    """Bytes that a case needs: predicted, measured, and of variables."""
    torch.manual_seed(0)
    work = CASES[name]()
    step = program(work, workers=1, recompute="off", progress=False)
    step(*work.inputs)
    host = ipu_dynamo.inspect(step).program.host  # type: ignore[union-attr]
    assert host is not None
    if host.memory is None:
        raise ValueError(f"{name}: {host.absent['memory']}")
    variables = sum(sum(of.values()) for of in host.memory.variables.values())
    given = sum(tensor.nbytes for tensor in work.inputs)
    predicted = host.memory.peak_bytes() - variables - given
    print(name, host.memory, sep="\n")
    measured = peak_bytes(lambda: step(*work.inputs))
    return {"predicted": predicted, "measured": measured, "held": variables + given}


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted_memory")
    parser.add_argument("names", nargs="*", default=[*CASES])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for case in arguments.names or CASES:
            found = []
            for _ in range(1 + arguments.rounds):  # the first one compiles
                with Child(Path(name), **THRESHOLD) as child:
                    found.append(child.call("benchmarks.predicted_memory:figures", case))
            runs = found[1:]
            measured = statistics.median(run["measured"] for run in runs)
            predicted, held = runs[0]["predicted"], runs[0]["held"]
            print(
                f"{case}: predicted {predicted / MIB:.1f} MiB, measured {measured / MIB:.1f} "
                f"({', '.join(format(run['measured'] / MIB, '.1f') for run in runs)}), "
                f"{predicted / measured - 1:+.1%}; beside {held / MIB:.1f} MiB held between steps",
                flush=True,
            )


if __name__ == "__main__":
    main()

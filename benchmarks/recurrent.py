"""Train recurrent layers beside plain PyTorch, and time first calls of short and long sequences."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

import ipu_dynamo
from benchmarks.measure import Maker, Step
from benchmarks.provenance import ROOT

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
LAYERS, WIDTH, BATCH, STEPS = 2, 128, 32, 100
LENGTHS = 10, 1000  # of sequences whose first calls are compared


class Model(nn.Module):
    """Layers that predict a value for each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = KINDS[kind](WIDTH, WIDTH, num_layers=LAYERS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x)[0], y)


def _batch(steps: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, BATCH, WIDTH), torch.randn(steps, BATCH, WIDTH)


def _plain(kind: str) -> Step:
    model, batch = Model(kind), _batch(STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return step


def _program(kind: str, steps: int = STEPS) -> Step:
    model, batch = Model(kind), _batch(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = ipu_dynamo.compile_training(model, optimizer)
    return lambda: run(*batch)


def _contenders(kind: str) -> Mapping[str, Maker]:
    return {"PyTorch": partial(_plain, kind), "ipu_dynamo": partial(_program, kind)}


CASES: dict[str, Callable[[], Mapping[str, Maker]]] = {
    kind: partial(_contenders, kind) for kind in KINDS
}


def first_calls() -> dict[str, float]:
    """Seconds of a first call, each in a process of its own with nothing compiled before."""
    found = {}
    for kind in KINDS:
        short, long = (_first_call(kind, steps) for steps in LENGTHS)
        found[f"{kind}, {LENGTHS[0]} steps, s"] = short
        found[f"{kind}, {LENGTHS[1]} steps, times that"] = long / short
    return found


def _first_call(kind: str, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "IPU_DYNAMO_CACHE_DIR": os.path.join(folder, "stages"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
            "OMP_NUM_THREADS": "1",  # the step is part of the call, and threads wait for each other
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "benchmarks.recurrent", kind, str(steps)]
        run = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return float(run.stdout.splitlines()[-1])


def main() -> None:
    """Make a first call, and print how long it took."""
    kind, steps = sys.argv[1:]
    call = _program(kind, int(steps))
    start = time.perf_counter()
    call()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()

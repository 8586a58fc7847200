"""Train recurrent layers beside plain PyTorch, and time first calls of short and long sequences."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

import ipu_dynamo
from benchmarks.jax_peer import models as in_jax
from benchmarks.jax_peer.peer import Training, trained, with_jax
from benchmarks.measure import Maker, Step
from benchmarks.processes import fresh_environment
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
    optimizer = _sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return step


def _program(kind: str, steps: int = STEPS) -> Step:
    model, batch = Model(kind), _batch(steps)
    run = ipu_dynamo.compile_training(model, _sgd(model))
    return lambda: run(*batch)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _contenders(kind: str) -> Mapping[str, Maker]:
    both: dict[str, Maker] = {
        "PyTorch": partial(_plain, kind),
        "ipu_dynamo": partial(_program, kind),
    }
    if kind != "lstm":
        return both
    loss = partial(in_jax.lstm, layers=LAYERS)
    work = Training(Model(kind), _sgd, loss, _batch(STEPS), BATCH, axis=1)
    return with_jax(both, partial(trained, work))


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
    # The step is part of the call, and threads would wait for each other.
    with fresh_environment(threads=1) as environment:
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

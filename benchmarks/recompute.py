"""Measure what recomputation saves in a 12-layer encoder, against `torch.utils.checkpoint`.

Usage: python -m benchmarks.recompute [--engine NAME] [--repetitions N] [--json FILE]

Each contender runs in processes of its own, see `benchmarks.serialized_head`. Its extra memory is
what a step adds to what the process holds between steps, measured where freed memory goes back at
once. Its time is that of the processor, measured where it does not, as for users. Gradients outlive
the step in all of them. The budget is halfway between the plain step and full recomputation. With
the engine `inductor` PyTorch's contenders are compiled too, by `torch.compile`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipu_dynamo
from benchmarks.layers import Layer
from benchmarks.peak_memory import THRESHOLD, peak_bytes
from benchmarks.provenance import provenance
from ipu_dynamo.runtime.engines.engines import make_engine

LAYERS, WIDTH, LENGTH, BATCH, HEADS = 12, 256, 256, 4, 8
CONTENDERS = ("torch", "torch checkpoint", "plain", "recompute", "budget")


class Encoder(nn.Module):
    """Pre-norm layers with attention on `[batch, length, width]`, and a squared loss."""

    def __init__(self, wrap: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.wrap = wrap
        self.layers = nn.ModuleList(Layer(WIDTH, HEADS) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.wrap(layer, x)
        return nn.functional.mse_loss(x, y)


def whole(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keep what autograd keeps."""
    return layer(x)  # type: ignore[no-any-return]


def checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keep a layer's input."""
    return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def marked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keep a layer's input, in a program."""
    return layer(ipu_dynamo.recomputation_checkpoint(x))  # type: ignore[no-any-return]


def make_step(who: str, engine: str, budget: int) -> Callable[[], torch.Tensor]:
    """A training step of a contender."""
    torch.manual_seed(0)
    wraps = {"torch checkpoint": checkpointed, "recompute": marked, "budget": marked}
    model = Encoder(wraps.get(who, whole))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    if who in ("torch", "torch checkpoint"):
        forward = torch.compile(model) if make_engine(engine).name == "inductor" else model

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss: torch.Tensor = forward(x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step
    options = {"engine": engine, "recompute": "all" if who == "recompute" else "auto"}
    if who == "budget":
        options["recompute_budget"] = budget
    compiled = ipu_dynamo.compile_training(model, optimizer, options)
    return lambda: compiled(x, y)


def measure(who: str, engine: str, budget: int, what: str) -> dict[str, float]:
    """The median time of a step, or by how much one raises the memory of this process."""
    step = make_step(who, engine, budget)
    for _ in range(2):
        loss = step()
    if what == "nbytes":
        return {"nbytes": peak_bytes(step), "loss": loss.item()}
    seconds = []
    for _ in range(5):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return {"seconds": statistics.median(seconds)}


def main() -> None:
    """Run every contender `repetitions` times, in turn, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("nbytes", "seconds"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found_here = measure(arguments.one, arguments.engine, arguments.budget, arguments.what)
        print(json.dumps(found_here))
        return
    found: dict[str, list[dict[str, float]]] = {who: [] for who in CONTENDERS}
    budget = 0
    for _ in range(arguments.repetitions):
        for who in CONTENDERS:
            if who == "budget" and not budget:
                ends = (found["plain"][0]["nbytes"], found["recompute"][0]["nbytes"])
                budget = round(sum(ends) / 2)
            command = [sys.executable, "-m", "benchmarks.recompute", "--one", who]
            command += ["--engine", arguments.engine, "--budget", str(budget)]
            result: dict[str, float] = {}
            for what, more in (("nbytes", THRESHOLD), ("seconds", {})):
                done = subprocess.run(
                    [*command, "--what", what],
                    env=os.environ | more,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                result |= json.loads(done.stdout.splitlines()[-1])
            found[who].append(result)
    print(f"{LAYERS} layers, width {WIDTH}, {BATCH} x {LENGTH} tokens")
    for who, runs in found.items():
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"  {who:<16} extra memory {row['nbytes'] / 2**20:7.1f} MiB"
            f"   step {1e3 * row['seconds']:7.1f} ms   loss {row['loss']:.6f}"
        )
    print(f"  the budget was {budget / 2**20:.1f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps({**provenance(), "recompute": found}, indent=1))


if __name__ == "__main__":
    main()

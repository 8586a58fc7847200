"""Run a loop of 1,000 iterations beside Python's, and compare programs of short and long loops.

The body is a layer with tanh.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

import ipu_dynamo
from benchmarks.jax_peer import models as in_jax
from benchmarks.jax_peer.peer import inferred, with_jax
from benchmarks.measure import Maker, Step
from benchmarks.processes import fresh_environment
from benchmarks.provenance import ROOT

WIDTH, ROWS, COUNT = 64, 16, 1000
COUNTS = 10, 10_000  # iterations of the programs that are compared
_COMPILE = "from benchmarks.loops import print_compiled; print_compiled({})"


class Plain(nn.Module):
    """A loop in Python."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.count = nn.Linear(WIDTH, WIDTH), count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = self.layer(x).tanh()
        return x


class Looped(Plain):
    """The same loop as an operator."""

    def forward(self, x: Tensor) -> Tensor:
        return ipu_dynamo.for_loop(self.count, lambda h: self.layer(h).tanh(), [x])[0]


def contenders() -> Mapping[str, Maker]:
    """Inference, on one thread."""
    x = torch.randn(ROWS, WIDTH)
    both: dict[str, Maker] = {"PyTorch": partial(_plain, x), "ipu_dynamo": partial(_program, x)}
    function = partial(in_jax.repeated, count=COUNT)
    return with_jax(both, lambda: inferred(function, Plain(COUNT), x))


def programs() -> dict[str, float]:
    """The size of programs, and the processor's seconds to compile them, with nothing compiled."""
    short, long = (_compiled(count) for count in COUNTS)
    return {
        f"{COUNTS[0]} iterations, characters": short["characters"],
        f"{COUNTS[1]} iterations, characters": long["characters"],
        f"{COUNTS[0]} iterations, s to compile": short["seconds"],
        f"{COUNTS[1]} iterations, times that": long["seconds"] / short["seconds"],
    }


def print_compiled(count: int) -> None:
    """Compile a loop, and print the size of its program and the seconds, as JSON."""
    run = ipu_dynamo.compile_inference(Looped(count))
    start = _processor_seconds()
    run.compile(torch.randn(ROWS, WIDTH))
    seconds = _processor_seconds() - start
    print(json.dumps({"characters": len(run.program.text()), "seconds": seconds}))


def _plain(x: Tensor) -> Step:
    model = Plain(COUNT)

    @torch.no_grad()
    def step() -> None:
        model(x)

    return step


def _program(x: Tensor) -> Step:
    run = ipu_dynamo.compile_inference(Looped(COUNT), own_weights=True)
    return lambda: run(x)


def _compiled(count: int) -> dict[str, float]:
    with fresh_environment(threads=1) as environment:
        command = [sys.executable, "-c", _COMPILE.format(count)]
        run = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    figures: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return figures


def _processor_seconds() -> float:
    """Of this process and of those that it has waited for: the C++ compiler."""
    return sum(os.times()[:4])

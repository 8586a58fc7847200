"""Measure what serialising the head of a language model saves, and what it costs.

Usage: python -m benchmarks.serialized_head [--engine NAME] [--repetitions N] [--json FILE]

Each contender runs in processes of its own, which say by how much a step raises their memory above
what they hold between steps. The C library gives freed memory back at once (a fixed threshold for
mmap), so that the peak is that of the step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from benchmarks.peak_memory import THRESHOLD, peak_bytes
from benchmarks.provenance import provenance
from ipu_dynamo.ops.marks.serialized import Mode

TOKENS, WIDTH, VOCABULARY, FACTOR = 512, 512, 50304, 16
MODES = ("none", "output_channels", "input_channels")


class Head(nn.Module):
    """An embedding, a layer, and a product with the embedding's matrix: loss of `[tokens]`."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode = mode
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.embedding(tokens))
        logits = ipu_dynamo.serialized_matmul(h, self.embedding.weight.t(), self.mode, FACTOR)
        return F.cross_entropy(logits, targets)


def measure(mode: str, engine: str) -> dict[str, float]:
    """The median time of a step, and by how much one raises the memory of this process."""
    torch.manual_seed(0)
    model = Head(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = ipu_dynamo.compile_training(model, optimizer, {"engine": engine})
    tokens = torch.randint(VOCABULARY, (TOKENS,))
    targets = torch.randint(VOCABULARY, (TOKENS,))
    for _ in range(2):
        step(tokens, targets)
    nbytes = peak_bytes(lambda: step(tokens, targets))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        loss = step(tokens, targets)
        seconds.append(time.perf_counter() - start)
    return {"nbytes": nbytes, "seconds": statistics.median(seconds), "loss": loss.item()}


def main() -> None:
    """Run every contender `repetitions` times, in turn, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serialized_head")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.engine)))
        return
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(arguments.repetitions):
        for mode in MODES:
            command = [sys.executable, "-m", "benchmarks.serialized_head", "--one", mode]
            command += ["--engine", arguments.engine]
            done = subprocess.run(
                command, env=os.environ | THRESHOLD, capture_output=True, text=True, check=True
            )
            found[mode].append(json.loads(done.stdout.splitlines()[-1]))
    table = {
        mode: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for mode, runs in found.items()
    }
    plain = table["none"]
    print(f"head of {TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY}, factor {FACTOR}")
    for mode, row in table.items():
        print(
            f"  {mode:<16} extra memory {row['nbytes'] / 2**20:7.1f} MiB"
            f" ({row['nbytes'] / plain['nbytes']:4.2f})   step {1e3 * row['seconds']:7.1f} ms"
            f" ({row['seconds'] / plain['seconds']:4.2f})   loss {row['loss']:.6f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({**provenance(), "serialized_head": found}, indent=1))


if __name__ == "__main__":
    main()

"""Measure the memory and the time of steps with a serialised head of a language model.

Usage: python -m benchmarks.serialized_head [--engine NAME] [--repetitions N] [--json FILE]

See `benchmarks.peak_memory` for how it is measured.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from benchmarks import peak_memory
from benchmarks.measure import Maker, Step
from benchmarks.models import SerializedHead, WithLoss
from benchmarks.work import Training, sgd, whole

TOKENS, WIDTH, VOCABULARY, FACTOR = 512, 512, 50304, 16
MODES = ("none", "output_channels", "input_channels")


def contenders(_: peak_memory.Found) -> Mapping[str, Maker]:
    """Steps whose head is in parts along each dimension."""
    return {mode: partial(_step, mode) for mode in MODES}


def _step(mode: str) -> Step:
    """Train an embedding, a layer, and a product with the embedding's matrix, on `[tokens]`."""
    table = nn.Embedding(VOCABULARY, WIDTH)
    head = SerializedHead(table.weight, mode, FACTOR)
    model = WithLoss(table, nn.Linear(WIDTH, WIDTH), head)
    inputs = torch.randint(VOCABULARY, (2, TOKENS)).unbind()
    return whole(Training(model, sgd, inputs, TOKENS))


if __name__ == "__main__":
    size = f"head of {TOKENS} tokens, width {WIDTH}, vocabulary {VOCABULARY}, factor {FACTOR}"
    peak_memory.main("benchmarks.serialized_head:contenders", size, "perf_counter")

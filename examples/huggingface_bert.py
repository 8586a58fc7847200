"""Train a small BERT of transformers on two virtual IPUs, placed by an IPUConfig.

The model is transformers' own class with random weights; its text is the licence that ships with
Python, one token for each byte. Beside it the same training runs in plain PyTorch.
"""

import copy
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import poptorch
from ipu_dynamo.optimum import IPUConfig, deparallelize, parallelize

TOKENS, MICRO_BATCH = 32, 2
MASK, VOCABULARY = 256, 260  # behind the bytes; a multiple of 4
LEARNING_RATE = 2e-3
IGNORED = -100  # the label of what is not masked


class Loss(nn.Module):
    """A masked language model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def small_bert() -> nn.Module:
    """Four layers without dropout, so that both trainings draw nothing."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).train()


def licence() -> Tensor:
    """The bytes of Python's licence, or where that is kept elsewhere, of a module's source."""
    file = Path(os.__file__).with_name("LICENSE.txt")
    return torch.tensor(list((file if file.exists() else Path(os.__file__)).read_bytes()))


def batches(steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Pieces of the text, of which 15 % are masked; the labels are what was there."""
    text, drawn = licence(), torch.Generator().manual_seed(1)
    made = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - TOKENS, (rows, 1), generator=drawn)
        pieces = text[starts + torch.arange(TOKENS)]
        masked = torch.rand(pieces.shape, generator=drawn) < 0.15
        masked[:, 0] = True  # so that every micro-batch has a loss
        inputs = torch.where(masked, MASK, pieces)
        made.append((inputs, torch.where(masked, pieces, IGNORED)))
    return made


def on_ipus(
    model: nn.Module, config: IPUConfig, data: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[float], float]:
    """The mean loss of each step on virtual IPUs, and the seconds of a step after the first."""
    parallelize(model, config)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    training = poptorch.trainingModel(Loss(model), config.to_options(), optimizer)
    training.compile(*data[0])
    begin = time.perf_counter()
    losses = [float(training(*batch).mean()) for batch in data]
    seconds = (time.perf_counter() - begin) / len(data)
    training.destroy()
    deparallelize(model)
    return losses, seconds


def in_pytorch(
    model: nn.Module, accumulation: int, data: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[float], float]:
    """The same in a loop of plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, begin = [], time.perf_counter()
    for inputs, labels in data:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(inputs.chunk(accumulation), labels.chunk(accumulation), strict=True):
            loss = Loss(model)(*part) / accumulation
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, (time.perf_counter() - begin) / len(data)


def main(steps: int = 40) -> dict[str, Any]:
    """Train twice, print both curves, and return them, how far they are apart, and the times."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = IPUConfig(layers_per_ipu=[2, 2], gradient_accumulation_steps=8, output_mode="all")
    data = batches(steps, MICRO_BATCH * config.batch_size_factor())
    model = small_bert()
    plain = copy.deepcopy(model)
    ours, seconds = on_ipus(model, config, data)
    theirs, plain_seconds = in_pytorch(plain, config.gradient_accumulation_steps, data)
    print(f"{'step':>4} {'two IPUs':>10} {'PyTorch':>10}")
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        print(f"{step:>4} {one:>10.5f} {other:>10.5f}")
    print(f"a step takes {1e3 * seconds:.1f} ms, in plain PyTorch {1e3 * plain_seconds:.1f} ms")
    return {
        "difference": max(abs(one - other) for one, other in zip(ours, theirs, strict=True)),
        "first": ours[0],
        "last": ours[-1],
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "losses": {"two IPUs": ours, "plain PyTorch": theirs},
    }


if __name__ == "__main__":
    main()

"""Time a transformer trained as a pipeline of two stages, by one worker, by two, and by PyTorch."""

import copy
import statistics
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from benchmarks.layers import Layer
from benchmarks.measure import Maker, Step
from benchmarks.torch_pipelining import torch_pipeline
from ipu_dynamo.runtime.execute.timeline import Timeline

WIDTH, HEADS, LENGTH, VOCABULARY = 256, 8, 128, 64
LAYERS, MICRO_BATCH, ACCUMULATION = 4, 2, 8


class LanguageModel(nn.Module):
    """Tokens `[batch, length]` in, the loss of predicting the next ones out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, HEADS, causal=True) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def two_stages() -> dict[str, Maker]:
    """A step of 8 micro-batches. Eager has all cores, a worker or process one intra-op thread."""
    model = LanguageModel()
    tokens, targets = random_tokens()
    return {
        "eager": lambda: eager_loop(model, tokens, targets),
        "torch pipelining": lambda: torch_pipeline(
            _halves(model), _loss, tokens, targets, micro_batches=ACCUMULATION
        ),
        "1 worker": lambda: _pipeline(model, workers=1).run,
        "2 workers, zero bubble": lambda: _pipeline(model, workers=2, schedule="zero_bubble").run,
        "2 workers": lambda: _pipeline(model, workers=2).run,
    }


def idle_shares(steps: int = 20) -> dict[str, float]:
    """How the two workers spend a step, from timelines of real ones: medians of shares."""
    pipeline = _pipeline(LanguageModel(), workers=2)
    for _ in range(3):
        pipeline.run()
    executable = pipeline.step.executable
    lines = []
    for _ in range(steps):
        executable.timeline = Timeline()
        pipeline.run()
        lines.append(executable.timeline)
    idle = [1 - statistics.mean(line.busy().values()) for line in lines]
    return {
        "both workers busy, of the steady state": statistics.median(
            line.busy_at_once(2) for line in lines
        ),
        "workers idle": statistics.median(idle),
        "workers idle by the schedule": executable.schedule.idle,
    }


@dataclass(frozen=True)
class _Pipeline:
    step: ipu_dynamo.CompiledModel
    tokens: torch.Tensor
    targets: torch.Tensor

    def run(self) -> None:
        self.step(self.tokens, self.targets)


def random_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """A step's tokens, and the ones that follow them."""
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH * ACCUMULATION, LENGTH))
    return tokens, tokens.roll(-1, 1)


def _pipeline(
    model: LanguageModel,
    *,
    workers: int,
    schedule: Literal["grouped", "zero_bubble"] = "grouped",
) -> _Pipeline:
    own = copy.deepcopy(model)
    ipu_dynamo.BeginBlock(own.layers[LAYERS // 2], ipu_id=1)
    options = ipu_dynamo.Options(
        gradient_accumulation=ACCUMULATION,
        strategy=ipu_dynamo.Strategy(kind="pipelined", schedule=schedule),
        recompute="off",  # as the others, who keep what forward made
        workers=workers,
    )
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    return _Pipeline(ipu_dynamo.compile_training(own, optimizer, options), *random_tokens())


def _halves(model: LanguageModel) -> tuple[nn.Module, nn.Module]:
    own = copy.deepcopy(model)
    half = LAYERS // 2
    return (
        nn.Sequential(own.embedding, *own.layers[:half]),
        nn.Sequential(*own.layers[half:], own.head),
    )


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def eager_loop(model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor) -> Step:
    """A step of plain PyTorch, micro-batch by micro-batch."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        for rows, wanted in zip(tokens.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True):
            (own(rows, wanted) / ACCUMULATION).backward()
        optimizer.step()

    return step

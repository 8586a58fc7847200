"""Time a transformer trained as a pipeline of two stages, by one worker and by two."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from benchmarks.measure import Step

WIDTH, HEADS, LENGTH, VOCABULARY = 256, 8, 128, 64
LAYERS, MICRO_BATCH, ACCUMULATION = 4, 2, 8


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention, on `[batch, length, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attend(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Tokens `[batch, length]` in, the loss of predicting the next ones out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def two_stages() -> dict[str, Step]:
    """A step of 8 micro-batches. Eager has all cores, a worker has one intra-op thread."""
    model = LanguageModel()
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH * ACCUMULATION, LENGTH))
    targets = tokens.roll(-1, 1)
    return {
        "eager": _loop(model, tokens, targets),
        "1 worker": _pipeline(model, tokens, targets, workers=1),
        "2 workers": _pipeline(model, tokens, targets, workers=2),
    }


CASES: dict[str, Callable[[], dict[str, Step]]] = {"pipeline": two_stages}


def _pipeline(
    model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor, *, workers: int
) -> Step:
    own = copy.deepcopy(model)
    ipu_dynamo.BeginBlock(own.layers[LAYERS // 2], ipu_id=1)
    options = ipu_dynamo.Options(
        gradient_accumulation=ACCUMULATION,
        strategy=ipu_dynamo.Strategy(kind="pipelined"),
        workers=workers,
    )
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    step = ipu_dynamo.compile_training(own, optimizer, options)
    return lambda: step(tokens, targets)


def _loop(model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor) -> Step:
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        for rows, wanted in zip(tokens.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True):
            (own(rows, wanted) / ACCUMULATION).backward()
        optimizer.step()

    return step

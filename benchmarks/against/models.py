"""Build the small models that both checkouts run, from public names only.

Every model takes the tensors of its batch and returns `(loss, outputs)`; without the last one, the
targets, it returns the outputs. `stages` are the layers that begin its blocks, with their IPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipu_dynamo

CLASSES, VOCABULARY, LENGTH = 10, 96, 8
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model and what goes with it.

    Args:
        build: makes the model.
        data: makes a batch of so many rows.
        optimizer: makes its optimiser.
        options: options of the core that belong to the model.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)


class MLP(nn.Module):
    """Linear layers with an activation; dropout or a marked value between them where wanted."""

    def __init__(self, *, dropout: float = 0.0, checkpoint: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 48)])
        self.head = nn.Linear(48, CLASSES)
        self.dropout, self.checkpoint = dropout, checkpoint
        self.stages = ((self.layers[0], 0), (self.layers[2], 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
            if self.checkpoint:
                h = ipu_dynamo.recomputation_checkpoint(F.gelu(h))
            if self.dropout:
                h = F.dropout(h, self.dropout, self.training)
        scores = self.head(h)
        return scores if labels is None else (F.cross_entropy(scores, labels), scores)


class CNN(nn.Module):
    """Convolutions, one of them in groups, with batch normalisation, for images of 3 x 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.upper = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, groups=4), nn.BatchNorm2d(16))
        self.head = nn.Linear(16 * 4, CLASSES)
        self.stages = ((self.lower, 0), (self.upper, 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h = F.max_pool2d(F.relu(self.lower(x)), 2)
        h = F.avg_pool2d(F.relu(self.upper(h)), 2)
        scores = self.head(h.flatten(1))
        return scores if labels is None else (F.cross_entropy(scores, labels), scores)


class Transformer(nn.Module):
    """Four equal encoder layers, which are outlined, and a head over the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(4)
        )
        self.head = nn.Linear(32, CLASSES)
        self.stages = ((self.inner, 0), (self.layers[2], 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h = self.inner(x)
        for layer in self.layers:
            h = layer(h)
        scores = self.head(h.mean(1))
        return scores if labels is None else (F.cross_entropy(scores, labels), scores)


class LanguageModel(nn.Module):
    """A language model whose head is the embedding, in parts; the two may lie on two IPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.stages = ((self.embedding, 0), (self.layers[1], 1))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        rows, weight = h.flatten(0, 1), self.embedding.weight.t()
        scores = ipu_dynamo.serialized_matmul(rows, weight, "output_channels", 4)
        return scores if targets is None else F.cross_entropy(scores, targets.flatten())


class ThreeBlocks(nn.Module):
    """A language model whose weight is tied across IPUs, and whose head comes home to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[3].weight = self.layers[0].weight
        self.stages = ((self.embedding, 0), (self.layers[2], 1), (self.norm, 0))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        scores = self.head(self.norm(h)).flatten(0, 1)
        return scores if targets is None else (F.cross_entropy(scores, targets.flatten()), scores)


class Half(nn.Module):
    """A layer and its norm in float16 between two in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 48)
        self.middle = nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU()).half()
        self.head = nn.Linear(48, CLASSES).half()
        self.stages = ((self.inner, 0), (self.middle, 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.head(self.middle(torch.tanh(self.inner(x)).half())).float()
        return scores if labels is None else (F.cross_entropy(scores, labels), scores)


class LSTM(nn.Module):
    """An embedding, an LSTM that is unrolled over a few words, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)
        self.stages = ((self.embedding, 0), (self.head, 1))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        _, (last, _) = self.lstm(self.embedding(tokens))
        scores = self.head(last[-1])
        return scores if labels is None else (F.cross_entropy(scores, labels), scores)


def _vectors(rows: int) -> Batch:
    return torch.randn(rows, 32), torch.randint(CLASSES, (rows,))


def _sequences(rows: int) -> Batch:
    return torch.randn(rows, LENGTH, 12), torch.randint(CLASSES, (rows,))


def _images(rows: int) -> Batch:
    return torch.randn(rows, 3, 8, 8), torch.randint(CLASSES, (rows,))


def _texts(vocabulary: int) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        tokens = torch.randint(vocabulary, (rows, LENGTH))
        return tokens, tokens.roll(-1, 1)

    return batch


def _short_texts(rows: int) -> Batch:
    return torch.randint(VOCABULARY, (rows, 4)), torch.randint(CLASSES, (rows,))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, with and without weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


CASES = {
    "mlp": Case(MLP, _vectors, _sgd),
    "cnn": Case(CNN, _images, _adamw),
    "transformer": Case(Transformer, _sequences, _adamw, {"outline": True}),
    "language_model": Case(LanguageModel, _texts(VOCABULARY), _adam),
    "half": Case(Half, _vectors, _plain_sgd, {"loss_scale": 64.0, "partials": "half"}),
    "dropout": Case(lambda: MLP(dropout=0.25), _vectors, _adam, {"seed": 7}),
    "three_blocks": Case(ThreeBlocks, _texts(24), _adam),
    "lstm": Case(LSTM, _short_texts, _rmsprop),
    "loss_scaling": Case(
        Half,
        _vectors,
        _adam,
        {"loss_scale": 2.0**16, "automatic_loss_scaling": ipu_dynamo.AutomaticLossScaling()},
    ),
    "checkpoints": Case(lambda: MLP(checkpoint=True), _vectors, _sgd, {"recompute": "all"}),
}

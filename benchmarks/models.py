"""Make the models of all benchmarks.

This file also runs in other checkouts, so it uses only the public names of `ipu_dynamo`. It looks
them up in calls, because imports are a part of the measured time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ipu_dynamo

CLASSES = 10


def cross_entropy(scores: Tensor, classes: Tensor) -> Tensor:
    """The mean loss of scores `[..., classes]`."""
    return F.cross_entropy(scores.flatten(0, -2), classes.flatten())


class WithLoss(nn.Module):
    """Layers in a row that return their loss, the form that every contender trains.

    Args:
        loss: of the last layer's output and the targets.
    """

    def __init__(
        self, *layers: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    ) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(*layers), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layers(x), y)


class Scored(WithLoss):
    """Layers that return `(loss, scores)`; without targets, the scores.

    Args:
        stages: the layers that begin its blocks, by number, and their IPUs.
        loss_only: with targets, the loss alone is returned.
    """

    def __init__(
        self, *layers: nn.Module, stages: tuple[tuple[int, int], ...], loss_only: bool = False
    ) -> None:
        super().__init__(*layers)
        self.stages, self.loss_only = stages, loss_only

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        scores = self.layers(x)
        if y is None:
            return scores
        loss = self.loss(scores, y)
        return loss if self.loss_only else (loss, scores)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Tensor:
        return self.function(x)


class Layer(nn.Module):
    """A pre-norm transformer layer, written out, on `[batch, length, width]`."""

    def __init__(self, width: int, heads: int = 8, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CheckpointedLayer(Layer):
    """A layer whose input is kept for the backward pass, by PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Places(nn.Module):
    """Add a vector to each place of `[batch, length, width]`."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ResidualTanh(nn.Linear):
    """A linear layer with tanh, whose result is added to the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class SerializedHead(nn.Module):
    """Scores of words by the table of an embedding, as a product in parts.

    Args:
        table: `[words, width]`.
        mode, factor: which dimension is cut, and into how many parts.
    """

    def __init__(self, table: nn.Parameter, mode: Any, factor: int) -> None:
        super().__init__()
        self.weight, self.mode, self.factor = table, mode, factor

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x.flatten(0, -2), self.weight.t()
        return ipu_dynamo.serialized_matmul(rows, weight, self.mode, self.factor)


class Repeated(nn.Module):
    """A layer with tanh, applied `count` times: by Python, or `as_operator` of ours."""

    def __init__(self, width: int, count: int, *, as_operator: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.count, self.as_operator = nn.Linear(width, width), count, as_operator

    def forward(self, x: Tensor) -> Tensor:
        if self.as_operator:
            return ipu_dynamo.for_loop(self.count, lambda h: self.layer(h).tanh(), [x])[0]
        for _ in range(self.count):
            x = self.layer(x).tanh()
        return x


class PlainEncoder(nn.Module):
    """PyTorch's own encoder layers between an embedding and a head; its loss needs no targets."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().log_softmax(-1).mean()


class Weights(nn.Module):
    """Weights whose gradients are their inputs."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.stack([(weight * x).sum() for weight in self.weights])
        return ipu_dynamo.identity_loss(sums, "sum")


def dense(widths: Sequence[int], *between: Callable[[], nn.Module]) -> list[nn.Module]:
    """Linear layers, and the modules of `between` after each of them."""
    return [
        module
        for pair in pairwise(widths)
        for module in (nn.Linear(*pair), *(make() for make in between))
    ]


def perceptron(*widths: int) -> WithLoss:
    """Linear layers with ReLU between them."""
    return WithLoss(*dense(widths, nn.ReLU)[:-1])


def mnist() -> WithLoss:
    """The network of PopTorch's first tutorial, for images of 28 x 28."""
    lower = [nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()]
    upper = [nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    return WithLoss(*lower, *upper, nn.Linear(320, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def small_images() -> WithLoss:
    """Two convolutions for images of 8 x 8."""
    lower = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    upper = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return WithLoss(*lower, *upper, nn.Linear(32 * 4 * 4, CLASSES))


class Residual(nn.Module):
    """Two convolutions with batch norms, next to a convolution of one place."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.short(x))


def residual(*widths: int) -> WithLoss:
    """Residual blocks for images of 8 x 8, no two of them equal."""
    blocks = (Residual(*pair) for pair in pairwise((1, *widths)))
    return WithLoss(*blocks, nn.Flatten(), nn.Linear(widths[-1] * 8 * 8, CLASSES))


def encoder(layers: int, width: int) -> WithLoss:
    """Equal layers between two linear ones, on `[batch, length, width]`."""
    between = (Layer(width) for _ in range(layers))
    return WithLoss(nn.Linear(width, width), *between, nn.Linear(width, width), loss=F.mse_loss)


def normed_encoder(layers: int, width: int) -> nn.Sequential:
    """Equal layers and a norm, for inference."""
    return nn.Sequential(*(Layer(width) for _ in range(layers)), nn.LayerNorm(width)).eval()


def plain_language_model(layers: int, words: int, width: int) -> WithLoss:
    """Tokens `[batch, length]` in, the loss of predicting the next ones out."""
    between = (Layer(width, causal=True) for _ in range(layers))
    return WithLoss(nn.Embedding(words, width), *between, nn.Linear(width, words))


def tied_language_model(layers: int, words: int, width: int, length: int) -> WithLoss:
    """The same with places and a norm, whose head is the table of words."""
    table, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    between = (Layer(width, causal=True) for _ in range(layers))
    head.weight = table.weight
    model = WithLoss(table, Places(length, width), *between, nn.LayerNorm(width), head)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Places):
            nn.init.normal_(module.weight, std=0.02)
    return model


def recurrent(kind: str, layers: int, width: int) -> WithLoss:
    """Layers of a kind (LSTM, GRU, RNN): a value for each step of `[length, batch, width]`."""
    run = getattr(nn, kind)(width, width, num_layers=layers)
    return WithLoss(run, Apply(itemgetter(0)), loss=F.mse_loss)


# The small models that `benchmarks.against` runs in both checkouts.

VOCABULARY = 96


def scored_mlp(*between: Callable[[], nn.Module]) -> Scored:
    """Linear layers with tanh, and the modules of `between` after each of them."""
    layers, third = dense((32, 48, 48, 48), nn.Tanh, *between), 2 * (2 + len(between))
    return Scored(*layers, nn.Linear(48, CLASSES), stages=((0, 0), (third, 1)))


def checkpointed_mlp() -> Scored:
    """The same with marked values."""
    mark = Apply(lambda x: ipu_dynamo.recomputation_checkpoint(x))
    return scored_mlp(nn.GELU, lambda: mark)


def scored_cnn() -> Scored:
    """Convolutions, one of them in groups, with batch normalisation, for images of 3 x 8 x 8."""
    lower = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    upper = [nn.Conv2d(8, 16, 3, padding=1, groups=4), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 4, CLASSES)]
    return Scored(*lower, nn.MaxPool2d(2), *upper, *head, stages=((0, 0), (4, 1)))


def scored_transformer() -> Scored:
    """Four equal encoder layers, which are outlined, and a head over the mean."""
    settings: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layer = partial(nn.TransformerEncoderLayer, 32, 4, 64, activation="gelu", **settings)
    mean = Apply(lambda x: x.mean(1))
    layers = [nn.Linear(12, 32), *(layer() for _ in range(4)), mean, nn.Linear(32, CLASSES)]
    return Scored(*layers, stages=((0, 0), (3, 1)))


def serialized_language_model() -> Scored:
    """A language model whose head is the embedding, in parts; the two may lie on two IPUs."""
    table = nn.Embedding(VOCABULARY, 32)
    between = (ResidualTanh(32, 32) for _ in range(2))
    head = SerializedHead(table.weight, "output_channels", 4)
    return Scored(table, *between, head, stages=((0, 0), (2, 1)), loss_only=True)


def three_blocks() -> Scored:
    """A language model whose weight is tied across IPUs, and whose head comes home to the first."""
    table, head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
    between = [ResidualTanh(16, 16) for _ in range(4)]
    head.weight, between[3].weight = table.weight, between[0].weight
    flat = Apply(lambda scores: scores.flatten(0, 1))
    layers = (table, *between, nn.LayerNorm(16), head, flat)
    return Scored(*layers, stages=((0, 0), (3, 1), (5, 0)))


def scored_half() -> Scored:
    """A layer and its norm in float16 between two in float32."""
    middle = nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU()).half()
    narrow, wide = Apply(lambda x: torch.tanh(x).half()), Apply(lambda x: x.float())
    head = nn.Linear(48, CLASSES).half()
    return Scored(nn.Linear(32, 48), narrow, middle, head, wide, stages=((0, 0), (2, 1)))


def scored_lstm() -> Scored:
    """An embedding, an LSTM that is unrolled over a few words, and a head."""
    last = Apply(lambda result: result[1][0][-1])
    layers = (nn.Embedding(VOCABULARY, 12), nn.LSTM(12, 16, batch_first=True), last)
    return Scored(*layers, nn.Linear(16, CLASSES), stages=((0, 0), (3, 1)))

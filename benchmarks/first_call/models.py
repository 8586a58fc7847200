"""Make first steps: models and what trains them.

This file also runs in other checkouts, so it takes nothing of this one but the public names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Training:
    """A model and the data of one step.

    Args:
        model: returns its loss.
        inputs: of one step; their rows are split into `accumulation` micro-batches.
        optimizer: makes one of the model.
        stages: the layers that begin an IPU of their own.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    accumulation: int = 1
    stages: tuple[str, ...] = ()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Digits(nn.Module):
    """The network of the example, on images `[batch, 1, 8, 8]` and labels `[batch]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.conv1(images))
        h = F.avg_pool2d(torch.tanh(self.conv2(h)), 2)
        h = torch.tanh(self.hidden(h.flatten(1)))
        return F.cross_entropy(self.output(h), labels)


class Classifier(nn.Module):
    """Linear layers with an activation between them, and the loss of their scores."""

    def __init__(self, widths: tuple[int, ...], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        self.activation = activation

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        *first, last = self.layers
        for layer in first:
            x = self.activation(layer(x))
        return F.cross_entropy(last(x), labels)


class Layer(nn.Module):
    """A pre-norm transformer layer, written out, on `[batch, length, width]`."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
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


class LanguageModel(nn.Module):
    """Tokens `[1, length]` in, the loss of predicting the next ones out; the head is the table."""

    def __init__(self, layers: int, words: int, width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 8, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.words(tokens) + self.places.weight
        for layer in self.layers:
            h = layer(h)
        logits = F.linear(self.norm(h), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """Equal layers on `[batch, length, width]`."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, 8, causal=False) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.last(x), y)


def _labels(rows: int) -> Tensor:
    return torch.randint(10, (rows,))


def digits() -> Training:
    stages = ("conv1", "conv2", "hidden", "output")
    return Training(Digits(), (torch.rand(64, 1, 8, 8), _labels(64)), sgd, 8, stages)


def other() -> Training:
    model = Classifier((48, 80, 56, 10), torch.relu)
    stages = ("layers.0", "layers.1", "layers.2")
    return Training(model, (torch.rand(64, 48), _labels(64)), adamw, 8, stages)


def mlp() -> Training:
    return Training(Classifier((784, 128, 10), torch.relu), (torch.rand(32, 784), _labels(32)), sgd)


def language_model() -> Training:
    tokens = torch.randint(8192, (8, 128))
    return Training(LanguageModel(4, 8192, 256, 128), (tokens, tokens.roll(-1, 1)), adamw, 8)


def encoder(layers: int) -> Training:
    return Training(Encoder(layers, 256), tuple(torch.randn(2, 4, 64, 256).unbind()), adamw)


TRAININGS: dict[str, Callable[[], Training]] = {
    "digits": digits,
    "other": other,
    "mlp": mlp,
    "language_model": language_model,
    "encoder_6": lambda: encoder(6),
    "encoder_48": lambda: encoder(48),
}


def project_step(training: Training) -> Step:
    """The project's own: one program; stages make a pipeline of it."""
    import ipu_dynamo

    for ipu, name in enumerate(training.stages):
        ipu_dynamo.BeginBlock(training.model.get_submodule(name), ipu_id=ipu)
    kind = {"strategy": ipu_dynamo.Strategy(kind="pipelined")} if training.stages else {}
    options = ipu_dynamo.Options(
        engine="inductor", gradient_accumulation=training.accumulation, **kind
    )
    optimizer = training.optimizer(training.model)
    step = ipu_dynamo.compile_training(training.model, optimizer, options)
    return lambda: step(*training.inputs)


def inductor_step(training: Training) -> Step:
    """Inductor on the plain model, and on its optimiser."""
    model, optimizer = torch.compile(training.model), training.optimizer(training.model)
    update = torch.compile(optimizer.step)
    rows = len(training.inputs[0]) // training.accumulation

    def step() -> Tensor:
        optimizer.zero_grad()
        for micro_batch in zip(*(x.split(rows) for x in training.inputs), strict=True):
            loss = model(*micro_batch)
            (loss / training.accumulation).backward()
        update()
        return loss.detach()

    return step


def jax_step(training: Training) -> Step:
    """JAX, with the work of a step as one function."""
    from .jax_step import jax_step  # takes more of this checkout than public names

    return jax_step(training)


STEPS = {"project": project_step, "inductor": inductor_step, "jax": jax_step}

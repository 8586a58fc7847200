"""Draw models with gradients that are zero except for roundings.

A norm or a softmax over positions does not change if all of these are shifted. So the gradient of
the bias of the layer before it is a sum that cancels.
"""

from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipu_dynamo

FRONTS = ("conv1d", "conv2d", "linear")
NORMS = ("batch norm", "instance norm", "layer norm", "softmax", "attention")
LOSSES = ("mse", "mean", "cross entropy")


class Cancelling(nn.Module):
    """A layer with bias, a norm over its positions, and a loss.

    Args:
        front: the layer; its results are [images, channels, positions].
        norm: an operator without a change if all positions of a channel are shifted.
    """

    def __init__(self, front: str, norm: str, loss: str, channels: int, positions: int) -> None:
        super().__init__()
        layers = {
            "conv1d": lambda: nn.Conv1d(3, channels, 3, padding=1),
            "conv2d": lambda: nn.Conv2d(3, channels, 3, padding=1),
            "linear": lambda: nn.Linear(3, channels),
        }
        self.front, self.norm, self.loss = front, norm, loss
        self.layer = layers[front]()
        if norm == "batch norm":
            self.scale = nn.BatchNorm1d(channels)
        elif norm == "instance norm":
            self.scale = nn.GroupNorm(channels, channels)
        elif norm == "layer norm":
            self.scale = nn.LayerNorm(positions)
        else:
            self.scale = nn.Identity()
        self.query = nn.Linear(channels, channels) if norm == "attention" else nn.Identity()
        self.last = nn.Linear(channels, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.front == "linear":
            h = self.layer(x.flatten(2).mT).mT
        else:
            h = self.layer(x if self.front == "conv2d" else x.flatten(2)).flatten(2)
        y = self._normalised(h)
        if self.loss == "mean":
            return ipu_dynamo.identity_loss(y.relu().mean(), "none")
        scores = self.last(y.square().mean(2))
        if self.loss == "cross entropy":
            return F.cross_entropy(scores, target)
        return F.mse_loss(scores, F.one_hot(target, 5).to(scores.dtype))

    def _normalised(self, h: Tensor) -> Tensor:
        if self.norm == "softmax":
            return h.softmax(2) * h.shape[2]
        if self.norm == "attention":  # the layer gives the keys
            weights = (self.query(h.detach().mT) @ h / h.shape[1] ** 0.5).softmax(2)
            return (weights @ h.detach().mT).mT
        normalised: Tensor = self.scale(h)
        return normalised


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model and its inputs.

    Args:
        number: equal numbers draw equal models.
        most: images, of up to 96 x 96 elements.
    """

    number: int
    most: int = 16

    @property
    def norm(self) -> str:
        return NORMS[self.number % len(NORMS)]

    def build(self) -> nn.Module:
        random, (_, edge) = Random(self.number), self._size
        front, loss, channels = random.choice(FRONTS), random.choice(LOSSES), random.choice((8, 32))
        torch.manual_seed(self.number)
        return Cancelling(front, self.norm, loss, channels, edge * edge)

    def data(self, micro_batches: int) -> tuple[Tensor, Tensor]:
        random, (images, edge) = Random(-self.number), self._size
        scale, shift = random.choice((1.0, 10.0)), random.choice((0.0, 3.0))
        generator = torch.Generator().manual_seed(self.number)
        x = torch.randn(micro_batches * images, 3, edge, edge, generator=generator)
        y = torch.randint(5, (micro_batches * images,), generator=generator)
        return scale * x + shift, y

    @property
    def _size(self) -> tuple[int, int]:
        """Images, and the height and width of each."""
        random = Random(self.number + 1000)
        edge = random.choice((8, 16) if self.norm == "attention" else (16, 48, 96))
        return random.choice((self.most // 4, self.most)), edge

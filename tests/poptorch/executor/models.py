"""Build the small models that the executor's tests run."""

import torch
from torch import Tensor, nn

import poptorch


class Classifier(nn.Module):
    """Two layers and a cross entropy; the second layer begins a block on IPU `second`."""

    def __init__(self, second: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        if second is not None:
            poptorch.BeginBlock(self.first, "first", 0)
            poptorch.BeginBlock(self.second, "second", second)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        out = self.second(torch.relu(self.first(x)))
        return out if y is None else (out, nn.functional.cross_entropy(out, y))


class Weighted(nn.Module):
    """One scalar weight w with the loss w * x, whose gradient is x."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        return poptorch.identity_loss(self.w * x, "sum")


class Layer(nn.Module):
    """A linear layer after modules of this class."""

    def __init__(self, *inner: "Layer") -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(4, 4), nn.ModuleList(inner)

    def values(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module.values(x)
        return torch.tanh(self.own(x))

    def forward(self, x: Tensor) -> Tensor:
        return poptorch.identity_loss(self.values(x).pow(2), "mean")


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and classes for a `Classifier`."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=rng), torch.randint(3, (rows,), generator=rng)

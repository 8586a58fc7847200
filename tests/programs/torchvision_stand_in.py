"""Stand for torchvision where a program downloads data or weights: random ones, of its shapes."""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, SIDE = 10, 28


class MNIST(torch.utils.data.Dataset[tuple[Any, int]]):
    """Noisy pictures of ten patterns, which a network can learn."""

    LENGTH = 2000

    def __init__(
        self, root: str, train: bool, download: bool, transform: Callable[[Tensor], Tensor]
    ) -> None:
        patterns = torch.Generator().manual_seed(0)
        bright = torch.rand(CLASSES, SIDE, SIDE, generator=patterns) < 0.2
        own = torch.Generator().manual_seed(1 if train else 2)
        self._classes = torch.randint(CLASSES, (self.LENGTH,), generator=own)
        noise = torch.randint(64, (self.LENGTH, SIDE, SIDE), generator=own)
        pictures = bright[self._classes] * 191 + noise
        self._pictures, self._transform = pictures.to(torch.uint8), transform

    def __len__(self) -> int:
        return self.LENGTH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._pictures[index]), int(self._classes[index])


class FashionMNIST(MNIST):
    """The same pictures."""


class CIFAR10(torch.utils.data.Dataset[tuple[Any, int]]):
    """Small pictures in colour, random ones, and their classes."""

    LENGTH = 512

    def __init__(
        self, root: str, train: bool, download: bool, transform: Callable[[Tensor], Tensor]
    ) -> None:
        self._transform = transform

    def __len__(self) -> int:
        return self.LENGTH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        own = torch.Generator().manual_seed(index)
        picture = torch.randint(256, (32, 32, 3), dtype=torch.uint8, generator=own)
        return self._transform(picture), index % CLASSES


class Compose:
    def __init__(self, steps: list[Callable[[Any], Any]]) -> None:
        self._steps = steps

    def __call__(self, picture: Any) -> Any:
        for step in self._steps:
            picture = step(picture)
        return picture


class Resize:
    """Give a picture another size, each point the colour of the nearest one."""

    def __init__(self, side: int) -> None:
        self._side = side

    def __call__(self, picture: Tensor) -> Tensor:
        rows, columns = (torch.arange(self._side) * n // self._side for n in picture.shape)
        return picture[rows][:, columns]


class ConvertImageDtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, picture: Tensor) -> Tensor:
        return picture.to(self._dtype)


class ToTensor:
    def __call__(self, picture: Tensor) -> Tensor:
        channels = picture.unsqueeze(0) if picture.dim() == 2 else picture.permute(2, 0, 1)
        return channels.float() / 255


class Normalize:
    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._mean, self._std = torch.tensor(mean), torch.tensor(std)

    def __call__(self, picture: Tensor) -> Tensor:
        return (picture - self._mean[:, None, None]) / self._std[:, None, None]


class _Bottleneck(nn.Module):
    """Widen, filter each channel, narrow; add the input where the shapes allow it."""

    def __init__(self, inner: int, outer: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = inner * factor
        self.adds = stride == 1 and inner == outer
        self.body = nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet_v2(pretrained: bool = False) -> nn.Module:
    """A network of MobileNetV2's kind with random weights, on pictures of 224 x 224."""
    rows = [(16, 1, 1), (24, 2, 6), (24, 1, 6), (32, 2, 6), (64, 2, 6), (96, 1, 6), (160, 2, 6)]
    layers: list[nn.Module] = [
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
    ]
    width = 32
    for outer, stride, factor in rows:
        layers.append(_Bottleneck(width, outer, stride, factor))
        width = outer
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, 1000)]
    return nn.Sequential(*layers)


_TRANSFORMS = (Compose, ConvertImageDtype, Normalize, Resize, ToTensor)


def install() -> None:
    """Let `import torchvision` find these."""
    parts = {
        "datasets": {c.__name__: c for c in (MNIST, FashionMNIST, CIFAR10)},
        "transforms": {c.__name__: c for c in _TRANSFORMS},
        "models": {"mobilenet_v2": mobilenet_v2, "resnet18": mobilenet_v2},  # any network
    }
    package = types.ModuleType("torchvision")
    sys.modules["torchvision"] = package
    for name, members in parts.items():
        module = types.ModuleType(f"torchvision.{name}")
        vars(module).update(members)
        setattr(package, name, module)
        sys.modules[f"torchvision.{name}"] = module

"""Models to convert, and the options of executables and pipelines."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from ipu_dynamo.saved_model import load, save
from ipu_dynamo.saved_model.conversion.convert import convert

ROWS = Dim("rows", min=1, max=1024)


class ThreeBranches(nn.Module):
    """Branches that mix in the graph's order, as the published pipeline has them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(12, width)
        for name in ("left", "middle", "right"):
            units = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
            setattr(self, name, nn.ModuleList(units))
        self.res = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> dict[str, Tensor]:
        z = self.table(ids)
        for i in range(3):
            x, y, z = self.left[i](x), self.middle[i](y), self.right[i](z)
        both = torch.cat([x, y, z], -1)
        return {"y": self.res(both), "split": both.view(both.shape[0], 3, -1).transpose(1, 2)}


def three_branches() -> ThreeBranches:
    torch.manual_seed(0)
    return ThreeBranches().eval()


def inputs(rows: int, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 8, generator=rng),
        "y": torch.randn(rows, 8, generator=rng),
        "ids": torch.randint(0, 12, (rows,), generator=rng),
    }


def save_branches(folder: Path, *, dynamic: bool = True, rows: int = 4) -> nn.Module:
    """Save the model into `folder`, and return it."""
    model = three_branches()
    shapes = {name: {0: ROWS} for name in ("x", "y", "ids")} if dynamic else None
    save(folder, {"serving_default": (model, tuple(inputs(rows).values()), shapes)})
    return model


def embedded(cachedir: str = "cache", **options: Any) -> dict[str, Any]:
    """The options of an executable, and others."""
    return {
        "int64_to_int32_conversion": True,
        "embedded_runtime_save_config": {
            "embedded_runtime_exec_cachedir": cachedir,
            "runtime_api_timeout_us": 5000,
        },
        **options,
    }


def converted(source: Path, out: Path, **options: Any) -> Any:
    """The signature of what a conversion writes."""
    convert(source, out, **options)
    return load(out)["serving_default"]


def assert_like(signature: Any, model: nn.Module, rows: int, *, within: float = 1e-5) -> None:
    """Compare results with the module's, relative to the largest."""
    given = inputs(rows, seed=rows)
    with torch.no_grad():
        expected = model(**given)
    results = signature(**given)
    assert list(results) == list(expected)
    for name, value in expected.items():
        assert results[name].shape == value.shape
        assert results[name].dtype == value.dtype
        assert (results[name] - value).abs().max() <= within * value.abs().max()

"""Modules to save, archives to damage, and the command in a process of its own."""

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim


class Branches(nn.Module):
    """A model of two branches, a normalisation and a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.right = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = torch.full((8,), 0.5)
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            low, high = self.norm(self.left(x)).split(4, -1)
        sum_ = self.right(y) * self.scale + self.shift
        return {"low": low, "both": sum_ + torch.cat([high, low], -1), "left": self.left(y)}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def branches() -> Branches:
    torch.manual_seed(0)
    model = Branches().eval()
    model.norm.running_mean.uniform_(-1, 1)
    model.norm.running_var.uniform_(1, 2)
    return model


def exported(module: nn.Module | None = None) -> torch.export.ExportedProgram:
    """A program with a leading dimension that calls choose."""
    batch = Dim("batch", min=1, max=64)
    example = (torch.randn(6, 4), torch.randn(6, 4))
    return torch.export.export(
        module or branches(), example, dynamic_shapes=({0: batch}, {0: batch})
    )


def archive(program: torch.export.ExportedProgram | None = None) -> bytes:
    """The bytes of a `.pt2` file."""
    file = io.BytesIO()
    torch.export.save(program or exported(), file)
    return file.getvalue()


def members(content: bytes) -> dict[str, bytes]:
    """The members of a zip file, in order."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def packed(parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip file of members, with right sums."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as target:
        for name, content in parts.items():
            target.writestr(name, content)
    return file.getvalue()


def with_program(content: bytes, change: Callable[[Any], None]) -> bytes:
    """The archive with a changed program, and sums that are right."""
    parts = members(content)
    (name,) = [name for name in parts if name.endswith("models/model.json")]
    value = json.loads(parts[name])
    change(value)
    return packed({**parts, name: json.dumps(value).encode()})


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `ipu-saved-model` does in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "ipu_dynamo.saved_model", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )

"""Run models in a process of its own, and write what came of each: host text and bits.

`python -m tests.properties.jobs JOBS RESULTS WORKERS`
"""

import json
import pickle
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ipu_dynamo import compile_training
from ipu_dynamo.options import Options
from ipu_dynamo.testing import BlockPlacement, Recipe
from tests.properties.running import calls, slow

THREADS = 2  # of every process


@dataclass(frozen=True)
class Images:
    """A small convolution, for which the library is chosen by what was measured."""

    rows: int = 4

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Pictures()

    def data(self, micro_batches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        rows = self.rows * micro_batches
        images = torch.randn(rows, 2, 12, 12, generator=generator)
        return images, torch.randint(0, 4, (rows,), generator=generator)


class Pictures(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)
        self.last = nn.Linear(4 * 8 * 8, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.second(self.first(x).relu()).relu()
        return {"loss": F.cross_entropy(self.last(h.flatten(1)), y)}


@dataclass(frozen=True)
class Job:
    """A model that trains for two calls."""

    recipe: Recipe | Images
    placement: BlockPlacement
    options: Options

    def run(self, workers: int) -> tuple[str, str]:
        """How it runs here, without the list of its workers, and a digest of what it leaves."""
        model = self.placement.place(self.recipe.build())
        optimizer = slow(model)
        options = replace(self.options, workers=workers)
        step = compile_training(model, optimizer, options)
        returned = [step(*arguments) for arguments in calls(self.recipe, options)]
        step.read_optimizer_state()
        host = step.executable.host_program
        states = [dict(state) for state in optimizer.state.values()]
        bits = sha256()
        for leaf in pytree.tree_leaves((returned, dict(model.state_dict()), states)):
            bits.update(repr(leaf if not isinstance(leaf, Tensor) else leaf.dtype).encode())
            if isinstance(leaf, Tensor):
                bits.update(leaf.detach().contiguous().flatten().view(torch.uint8).numpy())
        return f"{host.inlined.text()}\n{replace(host.plan, workers='')}", bits.hexdigest()


def main(jobs: Path, results: Path, workers: int) -> None:
    """Run every job of a file, and write a list of pairs. The first line says that it begins."""
    print("ready", flush=True)
    torch.set_num_threads(THREADS)
    ran = [job.run(workers) for job in pickle.loads(jobs.read_bytes())]
    results.write_text(json.dumps(ran))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

"""Train models on two ranks through DDP and FSDP2, compiled and plain, and note what each rank has.

    python -m tests.torch_compile.data_parallel FOLDER ROW...

Both ranks run it, with RANK set; they meet by a file in FOLDER, and write there what they have.
Models are classes of this module: under DDP and FSDP2 PyTorch compiles the user's frames only, and
a bare `nn.Sequential` is compiled by no backend.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu

STEPS, ROWS = 3, 8
WIDTH = 512  # of a layer whose weight fills the smallest bucket, a megabyte
How = Mapping[str, Any] | None  # arguments of torch.compile; None: not compiled


class Layer(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, norm) for _ in range(3))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def compiled(model, how: How):
    return model if how is None else torch.compile(model, **how)


def ddp_around(model, how: How, **settings):
    return DistributedDataParallel(compiled(model, how), **settings)


def ddp_within(model, how: How, **settings):
    return compiled(DistributedDataParallel(model, **settings), how)


def fsdp_whole(model, how: How):
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    return compiled(model, how)


def fsdp_blocks(model, how: How):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        if how is not None:
            layer.compile(**how)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class Row:
    """A form of training.

    Args:
        form: wraps and compiles a model.
        programs: how many there are afterwards; each graph has one forward and one backward.
        settings: of DistributedDataParallel.
        options: of the backend.
        width, norm: of the model.
        cut: whether PyTorch cuts the graph at DDP's buckets.
        tolerance: by which weights and losses may differ from those in plain PyTorch.
        told: how warnings about graphs begin.
    """

    form: Callable[..., Any]
    programs: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    width: int = 8
    norm: bool = False
    cut: bool = True
    tolerance: float = 0.0
    told: Sequence[str] = field(default_factory=list)


SMALL = {"bucket_cap_mb": 1}
CUTS = ["DistributedDataParallel cuts the graph at its buckets"]
EAGER = {
    "around": Row(ddp_around, 2),
    "within": Row(ddp_within, 2),
    "several-buckets": Row(ddp_within, 6, SMALL, width=WIDTH, told=CUTS),
    "not-cut": Row(ddp_within, 2, SMALL, width=WIDTH, cut=False),
    "static-graph": Row(ddp_around, 2, {"static_graph": True}),
    "batch-norm": Row(ddp_around, 2, norm=True),
    "batch-norm-within": Row(ddp_within, 2, norm=True),
    "micro-batches": Row(ddp_around, 3, options={"micro_batches": 2}, tolerance=1e-7),
    "fsdp": Row(fsdp_whole, 4),
    "fsdp-blocks": Row(fsdp_blocks, 4),
}
INDUCTOR = {
    f"{name}-inductor": replace(EAGER[name], options={"engine": "inductor"}, tolerance=1e-5)
    for name in ("around", "within", "several-buckets", "fsdp", "fsdp-blocks")
}


def trained(row: Row, how: How) -> dict[str, Any]:
    """The losses of this rank, and the weights at the end."""
    torch.manual_seed(0)
    model = Net(row.width, row.norm)
    run = row.form(model, how, **row.settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, row.width, generator=data)
        loss = F.cross_entropy(run(x), torch.randint(0, 4, (ROWS,), generator=data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }
    return {"losses": torch.stack(losses), "state": deepcopy(state)}


def of_row(row: Row) -> dict[str, Any]:
    """What a form of training gives in plain PyTorch and through the backend."""
    graphs = 0

    def plain(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.config.optimize_ddp = row.cut
    found = {"eager": trained(row, None)}
    torch._dynamo.reset()
    trained(row, {"backend": plain})
    torch._dynamo.reset()  # which forgets programs
    options = {"engine": "eager"} | row.options
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found["ipu"] = trained(row, {"backend": ipu, "options": options})
    told = [str(warning.message) for warning in told if "the graph" in str(warning.message)]
    return found | {"graphs": graphs, "programs": len(ipu_dynamo.programs()), "told": told}


def main(folder: Path, names: list[str]) -> None:
    """Train by each row, and write what this rank has."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name in names:
        torch.save(of_row((EAGER | INDUCTOR)[name]), folder / f"{name}.rank{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Train on two ranks, each a process with one thread: ours, DDP, and what ranks exchange.

A rank trains on the whole data of a training, so two ranks do the work of two. The last contender
is ours. Ranks that are not connected show what two processes can do on this machine at best.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.child import Child
from benchmarks.measure import Maker, Step
from benchmarks.work import Training, train, whole
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks.replica_sums import ReplicaSums
from ipu_dynamo.runtime.ranks.torch_transport import TorchTransport

EXCHANGED = 25, 1_000_000  # tensors, and elements of each: 100 MB of float32


def on_two_ranks(rank: str, *arguments: object) -> Step:
    """A step that two processes do together.

    Args:
        rank: a class as `module:name`. It is given the number of its rank, a file where the ranks
            meet, and the arguments. Its method `step` does the rank's part.
    """
    folder = Path(tempfile.mkdtemp())
    children = [Child(folder, OMP_NUM_THREADS="1") for _ in range(2)]  # end with this process

    def both(function: str, *given: tuple[object, ...]) -> None:
        for child, arguments in zip(children, given, strict=True):
            child.ask(function, *arguments)
        for child in children:
            child.answer()

    meeting = str(folder / "meeting")
    both(rank, *((number, meeting, *arguments) for number in range(2)))
    return lambda: both(".step", (), ())


def meet(rank: int, meeting: str) -> None:
    """Make the default group of two processes."""
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)


class Trained:
    """A rank of a training, in this process; see `WAYS`."""

    def __init__(self, rank: int, meeting: str, training: str, way: str) -> None:
        torch.manual_seed(0)
        work: Training = resolve_name(training)()
        if way != "not connected":
            meet(rank, meeting)
        self._step = WAYS[way](work)

    def step(self) -> None:
        """Train on the data of a call."""
        self._step()


def _ddp(work: Training, *, compiled: bool = False) -> Step:
    """DistributedDataParallel, whose gradients are exchanged once for a step."""
    model = DistributedDataParallel(work.model)
    optimizer = work.optimizer(work.model)
    run = torch.compile(model) if compiled else model
    update = torch.compile(optimizer.step) if compiled else optimizer.step
    number = 0

    def forward(*micro_batch: Tensor) -> Tensor:
        nonlocal number
        number += 1
        with nullcontext() if number % work.accumulation == 0 else model.no_sync():
            loss: Tensor = run(*micro_batch)
            return loss

    return lambda: [*train(work, forward, optimizer, update)]


def _on_mesh(work: Training, *, rows: int, **options: object) -> Step:
    mesh = init_device_mesh("cpu", (rows, 2 // rows), mesh_dim_names=("replica", "ipu"))
    return whole(work, replicas=rows, mesh=mesh, **options)


WAYS: dict[str, Callable[[Training], Step]] = {
    "DDP, eager": _ddp,
    "DDP, torch.compile, optimiser too": partial(_ddp, compiled=True),
    "not connected": whole,
    "mesh of 2 replicas": partial(_on_mesh, rows=2),
    "mesh of 2 IPUs": partial(_on_mesh, rows=1, recompute="off"),
}


def trained(training: str, *ways: str) -> Mapping[str, Maker]:
    """Steps of a training on two ranks in some of the ways of `WAYS`."""
    rank = "benchmarks.ranks:Trained"
    return {way: partial(on_two_ranks, rank, training, way) for way in ways}


class Summed:
    """A rank that sums tensors over both, in this process."""

    def __init__(self, rank: int, meeting: str, by: str) -> None:
        meet(rank, meeting)
        count, size = EXCHANGED
        tensors = [torch.ones(size) for _ in range(count)]
        if by == "all_reduce":
            flat = torch.cat(tensors)
            self._step: Step = lambda: distributed.all_reduce(flat)
        else:
            transport = TorchTransport(Share(2, 1, rank, 0), [0, 1])
            self._step = ReplicaSums([tensors], 2, transport)

    def step(self) -> None:
        """Sum them once."""
        self._step()


def exchange() -> Mapping[str, Maker]:
    """The sum of 100 MB over two ranks: gloo's, and ours in the order of the tree."""
    rank = "benchmarks.ranks:Summed"
    return {by: partial(on_two_ranks, rank, by) for by in ("all_reduce", "in the tree's order")}

"""Train two stages with PyTorch's own pipeline, 1F1B over gloo, as a step to time."""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.measure import Step

Loss = Callable[[Tensor, Tensor], Tensor]


def torch_pipeline(
    stages: tuple[nn.Module, nn.Module], loss: Loss, x: Tensor, y: Tensor, *, micro_batches: int
) -> Step:
    """A step of two processes with one thread each, which run eager PyTorch.

    Args:
        stages: the first takes `x`, the second takes the first one's output.
        loss: of the second stage's output and `y`, averaged over the micro-batches.
    """
    context = multiprocessing.get_context("spawn")
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    pipes: list[Connection] = []
    for rank, stage in enumerate(stages):
        ours, theirs = context.Pipe()
        context.Process(
            target=_serve,
            args=(theirs, rank, str(meeting), stage, loss, (x, y)[rank], micro_batches),
            daemon=True,
        ).start()
        pipes.append(ours)

    def step() -> None:
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()

    return step


def _serve(
    pipe: Connection,
    rank: int,
    meeting: str,
    module: nn.Module,
    loss: Loss,
    data: Tensor,
    micro_batches: int,
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    try:
        while pipe.recv():
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(data)
            else:
                schedule.step(target=data, losses=[])
            optimizer.step()
            pipe.send(True)
    except EOFError:  # the benchmark has ended
        distributed.destroy_process_group()

"""Train two stages with PyTorch's own pipeline, 1F1B over gloo, as a step to time."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.child import Child
from benchmarks.measure import Step
from benchmarks.work import Training


def torch_pipeline(training: str, cut: int) -> Step:
    """A step of two processes with one thread each, which run eager PyTorch.

    Args:
        training: `module:name` of a function that makes it; its model has its layers in a row.
        cut: the number of the layer that begins the second stage.
    """
    folder = Path(tempfile.mkdtemp())
    children = [Child(folder, OMP_NUM_THREADS="1") for _ in range(2)]  # end with this process

    def both(function: str, arguments: Callable[[int], tuple[object, ...]]) -> None:
        for rank, child in enumerate(children):
            child.ask(function, *arguments(rank))
        for child in children:
            child.answer()

    meeting = str(folder / "meeting")
    both("benchmarks.torch_pipelining:Stage", lambda rank: (training, cut, rank, meeting))
    return lambda: both(".step", lambda rank: ())


class Stage:
    """A stage of the pipeline, in this process."""

    def __init__(self, training: str, cut: int, rank: int, meeting: str) -> None:
        torch.manual_seed(0)
        work: Training = resolve_name(training)()
        layers = work.model.layers
        module = (layers[:cut], layers[cut:])[rank]
        distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, work.accumulation, loss_fn=work.model.loss)
        self._optimizer, self._rank, self._data = work.optimizer(module), rank, work.inputs[rank]

    def step(self) -> None:
        """Train on the micro-batches of a call; the loss is averaged over them."""
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(self._data)
        else:
            self._schedule.step(target=self._data, losses=[])
        self._optimizer.step()

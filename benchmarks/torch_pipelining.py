"""Train two stages with PyTorch's own pipeline, 1F1B over gloo, as a step to time."""

from pkgutil import resolve_name

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.measure import Step
from benchmarks.ranks import meet, on_two_ranks
from benchmarks.work import Training


def torch_pipeline(training: str, cut: int) -> Step:
    """A step of two processes with one thread each, which run eager PyTorch.

    Args:
        training: `module:name` of a function that makes it; its model has its layers in a row.
        cut: the number of the layer that begins the second stage.
    """
    return on_two_ranks("benchmarks.torch_pipelining:Stage", training, cut)


class Stage:
    """A stage of the pipeline, in this process."""

    def __init__(self, rank: int, meeting: str, training: str, cut: int) -> None:
        torch.manual_seed(0)
        work: Training = resolve_name(training)()
        layers = work.model.layers
        module = (layers[:cut], layers[cut:])[rank]
        meet(rank, meeting)
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

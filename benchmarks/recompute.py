"""Measure memory and time of recomputation in 12 layers, against `torch.utils.checkpoint`.

Usage: python -m benchmarks.recompute [--rounds N] [--json FILE]

See `benchmarks.peak_memory` for how it is measured; times are those of the processor. Gradients
outlive the step in all contenders. The budget is halfway between the plain step and full
recomputation. With the engine `inductor` PyTorch's contenders are compiled too, by `torch.compile`;
`IPU_DYNAMO_ENGINE` chooses another one.
"""

import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from benchmarks import peak_memory
from benchmarks.__main__ import main
from benchmarks.measure import Maker, Step
from benchmarks.models import Apply, CheckpointedLayer, Layer, WithLoss
from benchmarks.work import Training, loop, sgd, whole
from ipu_dynamo.runtime.engines.engines import make_engine

LAYERS, WIDTH, LENGTH, BATCH = 12, 256, 256, 4


def contenders(found: peak_memory.Found) -> Mapping[str, Maker]:
    """Steps that keep autograd's values, or the input of each layer, or as much as a budget."""
    ends = [found[who]["nbytes"] if who in found else 0.0 for who in ("plain", "recompute")]
    mark = Apply(ipu_dynamo.recomputation_checkpoint)
    budget = {"recompute_budget": round(sum(ends) / 2)}
    return {
        "torch": lambda: _torch_step(Layer),
        "torch checkpoint": lambda: _torch_step(CheckpointedLayer),
        "plain": lambda: whole(_training(Layer), recompute="auto"),
        "recompute": lambda: whole(_training(Layer, mark), recompute="all"),
        "budget": lambda: whole(_training(Layer, mark), recompute="auto", **budget),
    }


def _training(kind: type[Layer], *marks: nn.Module) -> Training:
    """Layers of a kind; `marks` come before each of them, to keep its input in a program."""
    layers = [module for _ in range(LAYERS) for module in (*marks, kind(WIDTH))]
    inputs = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    return Training(WithLoss(*layers, loss=F.mse_loss), sgd, inputs, BATCH)


def _torch_step(kind: type[Layer]) -> Step:
    """A step of plain PyTorch whose gradients stay in memory."""
    compiled = make_engine("auto").name == "inductor"
    work, settings = _training(kind), {"compile_model": torch.compile} if compiled else {}
    return loop(work, set_to_none=False, **settings)


if __name__ == "__main__":
    main(["recompute", *sys.argv[1:]])

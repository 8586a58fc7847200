"""Measure memory and time of recomputation in 12 layers, against `torch.utils.checkpoint`.

Usage: python -m benchmarks.recompute [--engine NAME] [--repetitions N] [--json FILE]

See `benchmarks.peak_memory` for how it is measured; times are those of the processor. Gradients
outlive the step in all contenders. The budget is halfway between the plain step and full
recomputation. With the engine `inductor` PyTorch's contenders are compiled too, by `torch.compile`.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from benchmarks import peak_memory
from benchmarks.measure import Maker, Step
from benchmarks.models import Apply, CheckpointedLayer, Layer, WithLoss
from benchmarks.work import Training, sgd, whole
from ipu_dynamo.runtime.engines.engines import make_engine

LAYERS, WIDTH, LENGTH, BATCH = 12, 256, 256, 4


def contenders(found: peak_memory.Found) -> Mapping[str, Maker]:
    """Steps that keep autograd's values, or the input of each layer, or as much as a budget."""
    ends = [found[who]["nbytes"] if who in found else 0.0 for who in ("plain", "recompute")]
    budget = {"recompute_budget": round(sum(ends) / 2)}
    return {
        "torch": lambda: _torch_step(Layer),
        "torch checkpoint": lambda: _torch_step(CheckpointedLayer),
        "plain": lambda: whole(_training(_layers(Layer)), recompute="auto"),
        "recompute": lambda: whole(_training(_marked()), recompute="all"),
        "budget": lambda: whole(_training(_marked()), recompute="auto", **budget),
    }


def _layers(kind: type[Layer]) -> list[nn.Module]:
    return [kind(WIDTH) for _ in range(LAYERS)]


def _marked() -> list[nn.Module]:
    """Layers whose inputs are kept, in a program."""
    mark = Apply(ipu_dynamo.recomputation_checkpoint)
    return [module for layer in _layers(Layer) for module in (mark, layer)]


def _training(layers: list[nn.Module]) -> Training:
    inputs = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    return Training(WithLoss(*layers, loss=F.mse_loss), sgd, inputs, BATCH)


def _torch_step(kind: type[Layer]) -> Step:
    """A step of plain PyTorch whose gradients stay in memory."""
    work = _training(_layers(kind))
    optimizer = work.optimizer(work.model)
    forward = torch.compile(work.model) if make_engine("auto").name == "inductor" else work.model

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = forward(*work.inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    size = f"{LAYERS} layers, width {WIDTH}, {BATCH} x {LENGTH} tokens"
    table = peak_memory.main("benchmarks.recompute:contenders", size, "process_time")
    budget = (table["plain"]["nbytes"] + table["recompute"]["nbytes"]) / 2
    print(f"  the budget was {budget / 2**20:.1f} MiB")

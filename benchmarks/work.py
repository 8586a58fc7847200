"""Make steps of the same training in several ways: PyTorch's loop, its compilers, and ours.

Each trains the training's own model, as contenders are in processes of their own. This file also
runs in other checkouts, so it uses only the public names of `ipu_dynamo`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ipu_dynamo
from benchmarks.measure import Step

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def sgd_with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@dataclass(frozen=True)
class Training:
    """A model, its optimiser and the data of a call.

    Args:
        model: takes a micro-batch, returns its loss.
        optimizer: makes one of a model.
        inputs: the rows of a call.
        rows: rows of a micro-batch, along dimension `axis`.
        accumulation: micro-batches of a step; a call may have several steps.
        stages: the layers that begin an IPU of their own, by name.
    """

    model: nn.Module
    optimizer: Optimizer
    inputs: tuple[Tensor, ...]
    rows: int
    accumulation: int = 1
    axis: int = 0
    stages: tuple[str, ...] = ()

    def micro_batches(self) -> list[tuple[Tensor, ...]]:
        """The parts of a call, in order."""
        return list(zip(*(t.split(self.rows, self.axis) for t in self.inputs), strict=True))

    def steps(self) -> int:
        """Steps of a call."""
        return self.inputs[0].shape[self.axis] // self.rows // self.accumulation


def loop(
    work: Training,
    compile_model: Callable[[nn.Module], Callable[..., Tensor]] = lambda model: model,
    *,
    optimizer_too: bool = False,
) -> Step:
    """The usual loop over the micro-batches of a call, which returns the last loss.

    Args:
        optimizer_too: whether `torch.compile` compiles the optimiser's step.
    """
    optimizer, forward = work.optimizer(work.model), compile_model(work.model)
    update = torch.compile(optimizer.step) if optimizer_too else optimizer.step

    def step() -> Tensor:
        for number, micro_batch in enumerate(work.micro_batches()):
            if number % work.accumulation == 0:
                optimizer.zero_grad()
            loss = forward(*micro_batch)
            (loss / work.accumulation if work.accumulation > 1 else loss).backward()
            if (number + 1) % work.accumulation == 0:
                update()
        return loss.detach()

    return step


def program(work: Training, **options: Any) -> "ipu_dynamo.CompiledModel":
    """A call as a program of ours; the stages of a training make a pipeline of it."""
    for ipu, name in enumerate(work.stages):
        ipu_dynamo.BeginBlock(work.model.get_submodule(name), ipu_id=ipu)
    if work.stages:
        options = {"strategy": ipu_dynamo.Strategy(kind="pipelined")} | options
    options = {
        "device_iterations": work.steps(),
        "gradient_accumulation": work.accumulation,
    } | options
    optimizer = work.optimizer(work.model)
    return ipu_dynamo.compile_training(work.model, optimizer, ipu_dynamo.Options(**options))


def whole(work: Training, **options: Any) -> Step:
    """A call of the program of a training."""
    run = program(work, **options)
    return lambda: run(*work.inputs)


def without_gradient(model: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """An inference by plain PyTorch, or by a model that it compiled."""

    @torch.no_grad()
    def step() -> None:
        model(x)

    return step


def inference(model: nn.Module, x: Tensor, *, own_weights: bool = True, **options: Any) -> Step:
    """An inference as a program of ours."""
    given = ipu_dynamo.Options(**options)
    run = ipu_dynamo.compile_inference(model, given, own_weights=own_weights)
    return lambda: run(x)

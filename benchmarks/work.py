"""Describe trainings, and make steps of one in several ways: PyTorch's loop, compilers, and ours.

Each trains the training's own model, as contenders are in processes of their own. This file also
runs in other checkouts, so it uses only the public names of `ipu_dynamo`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import ipu_dynamo
from benchmarks import models
from benchmarks.measure import Step

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
LANGUAGE_MODEL = 4, 8192, 256, 128  # layers, words, width, length
HEAD_WORDS, HEAD_WIDTH, HEAD_PARTS = 50304, 512, 16  # of the head that is serialised


def by(kind: type[torch.optim.Optimizer], **settings: Any) -> Optimizer:
    """A kind of optimiser with its settings, which is made for a model."""
    return lambda model: kind(model.parameters(), **settings)


sgd = by(torch.optim.SGD, lr=0.01)
sgd_with_momentum = by(torch.optim.SGD, lr=0.01, momentum=0.9)
adamw = by(torch.optim.AdamW)


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


def classifying(
    model: nn.Module, rows: int, count: int, *shape: int, optimizer: Optimizer = sgd, **more: Any
) -> Training:
    """Random data of `shape` and classes, in `count` micro-batches of `rows` rows."""
    labels = torch.randint(models.CLASSES, (count * rows,))
    return Training(model, optimizer, (torch.randn(count * rows, *shape), labels), rows, **more)


def mlp() -> Training:
    """A perceptron, where what surrounds the arithmetic counts."""
    return classifying(models.perceptron(64, 128, 10), 32, 200, 64)


def mlp_784(rows: int = 16, count: int = 50) -> Training:
    """One whose weights and states fill a cache."""
    model = models.perceptron(784, 128, 10)
    return classifying(model, rows, count, 784, optimizer=sgd_with_momentum)


def mnist() -> Training:
    """The network of PopTorch's first tutorial, on images of 28 x 28."""
    return classifying(models.mnist(), 8, 50, 1, 28, 28, optimizer=sgd_with_momentum)


def small_images(rows: int = 32, count: int = 1) -> Training:
    """A small convolutional network, one step in a call."""
    return classifying(models.small_images(), rows, count, 1, 8, 8, optimizer=sgd_with_momentum)


def texts(words: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and the ones that follow them."""
    tokens = torch.randint(words, (rows, length))
    return tokens, tokens.roll(-1, 1)


def language_model() -> Training:
    """A small language model of the GPT-2 kind: 8 micro-batches of one text, and AdamW."""
    layers, words, width, length = LANGUAGE_MODEL
    model = models.tied_language_model(layers, words, width, length)
    return Training(model, adamw, texts(words, 8, length), 1, accumulation=8)


def small_language_model() -> Training:
    """One of few words, without places: 8 micro-batches of two texts, and SGD."""
    layers, _, width, length = LANGUAGE_MODEL
    model = models.plain_language_model(layers, 64, width)
    return Training(model, sgd, texts(64, 16, length), 2, accumulation=8)


def trained_in_stages() -> Training:
    """One of 256 words, without places: 8 micro-batches of two texts, and AdamW."""
    layers, _, width, length = LANGUAGE_MODEL
    model = models.plain_language_model(layers, 256, width)
    return Training(model, adamw, texts(256, 16, length), 2, accumulation=8)


def small_pipeline() -> Training:
    """The same in two stages."""
    half = f"layers.{1 + LANGUAGE_MODEL[0] // 2}"
    return replace(small_language_model(), stages=("layers.0", half))


def encoder(layers: int) -> Training:
    """Equal layers of width 256, on 4 sequences of length 64."""
    return Training(models.encoder(layers, 256), adamw, torch.randn(2, 4, 64, 256).unbind(), 4)


def recurrent(kind: str, steps: int = 100) -> Training:
    """Two recurrent layers of width 128 on 32 sequences of so many steps."""
    model = models.recurrent(kind, 2, 128)
    return Training(model, sgd, torch.randn(2, steps, 32, 128).unbind(), 32, axis=1)


def head_in_parts(mode: str = "output_channels") -> Training:
    """An embedding, a layer, and a product with the embedding's matrix in parts."""
    table = nn.Embedding(HEAD_WORDS, HEAD_WIDTH)
    head = models.SerializedHead(table.weight, mode, HEAD_PARTS)
    model = models.WithLoss(table, nn.Linear(HEAD_WIDTH, HEAD_WIDTH), head)
    return Training(model, sgd, torch.randint(HEAD_WORDS, (2, 512)).unbind(), 512)


def train(
    work: Training,
    forward: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    update: Callable[[], object],
    *,
    set_to_none: bool = True,
) -> Iterator[Tensor]:
    """Train on the micro-batches of a call as PyTorch programs do; the loss of each of them."""
    for number, micro_batch in enumerate(work.micro_batches()):
        if number % work.accumulation == 0:
            optimizer.zero_grad(set_to_none)
        loss = forward(*micro_batch)
        (loss / work.accumulation if work.accumulation > 1 else loss).backward()
        if (number + 1) % work.accumulation == 0:
            update()
        yield loss.detach()


def loop(
    work: Training,
    compile_model: Callable[[nn.Module], Callable[..., Tensor]] = lambda model: model,
    *,
    optimizer_too: bool = False,
    set_to_none: bool = True,
) -> Step:
    """The usual loop over the micro-batches of a call, which returns the last loss.

    Args:
        optimizer_too: whether `torch.compile` compiles the optimiser's step.
        set_to_none: whether gradients are freed before a step, or set to zero.
    """
    optimizer, forward = work.optimizer(work.model), compile_model(work.model)
    update = torch.compile(optimizer.step) if optimizer_too else optimizer.step

    def step() -> Tensor:
        *_, last = train(work, forward, optimizer, update, set_to_none=set_to_none)
        return last

    return step


def program(
    work: Training,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: int | None = None,
    **options: Any,
) -> "ipu_dynamo.CompiledModel":
    """A call as a program of ours; the stages of a training make a pipeline of it.

    Args:
        optimizer: the training's own one, unless the program makes it.
        loss: which result of the model is the loss, where it has several.
    """
    for ipu, name in enumerate(work.stages):
        ipu_dynamo.BeginBlock(work.model.get_submodule(name), ipu_id=ipu)
    if work.stages:
        options = {"strategy": ipu_dynamo.Strategy(kind="pipelined")} | options
    options = {
        "device_iterations": work.steps(),
        "gradient_accumulation": work.accumulation,
    } | options
    optimizer, given = optimizer or work.optimizer(work.model), ipu_dynamo.Options(**options)
    return ipu_dynamo.compile_training(work.model, optimizer, given, loss=loss)


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

"""Time a small language model of the GPT-2 kind in training: 8 micro-batches and AdamW."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from benchmarks.jax_peer import models as in_jax
from benchmarks.jax_peer.peer import Training, trained, with_jax
from benchmarks.layers import Layer
from benchmarks.measure import Maker, Step
from benchmarks.pipeline import HEADS, LENGTH, WIDTH
from benchmarks.products import products_alone

LAYERS, VOCABULARY, ACCUMULATION = 4, 8192, 8


class TiedModel(nn.Module):
    """Tokens `[1, length]` in, the loss of predicting the next ones out; the head is the table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, HEADS, causal=True) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens) + self.places.weight
        for layer in self.layers:
            h = layer(h)
        logits = F.linear(self.norm(h), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_core() -> Mapping[str, Maker]:
    """Everybody has one thread."""
    model = TiedModel()
    contenders: dict[str, Maker] = {
        "eager": lambda: _loop(model, compiled=False, optimizer_too=False),
        "torch.compile": lambda: _loop(model, compiled=True, optimizer_too=False),
        "torch.compile, optimiser too": lambda: _loop(model, compiled=True, optimizer_too=True),
        "products alone": lambda: products_alone(_compiled(model), *_tokens()),
        "compile_training": lambda: _whole(model),
    }
    loss = partial(in_jax.language_model, layers=LAYERS, heads=HEADS)
    work = Training(model, _adamw, loss, _tokens(), 1, accumulation=ACCUMULATION)
    return with_jax(contenders, partial(trained, work))


def two_cores() -> Mapping[str, Maker]:
    """Two threads inside operators, or two micro-batches at once."""
    model = TiedModel()
    return {
        "eager": lambda: _loop(model, compiled=False, optimizer_too=False),
        "torch.compile": lambda: _loop(model, compiled=True, optimizer_too=False),
        "compile_training, side by side": lambda: _whole(model, side_by_side=True),
        "compile_training": partial(_whole, model),
    }


def all_cuts() -> Mapping[str, Maker]:
    """A pipeline of two stages on two cores: cut before each layer, and where it is balanced."""
    model = TiedModel()

    def eager_on_one_core() -> Step:
        torch.set_num_threads(1)
        return _loop(model, compiled=False, optimizer_too=False)

    def cut_before(layer: int) -> Step:
        own = copy.deepcopy(model)
        begins = own.layers[layer] if layer < LAYERS else own.norm
        ipu_dynamo.BeginBlock(begins, ipu_id=1)
        return _whole(own, strategy=ipu_dynamo.Strategy(kind="pipelined"), recompute="off")

    balanced = ipu_dynamo.Strategy(kind="pipelined", ipus=2)
    return {
        "eager, one core": eager_on_one_core,
        **{f"cut before layer {n}": partial(cut_before, n) for n in range(1, LAYERS)},
        "cut before the head": partial(cut_before, LAYERS),
        "balanced": lambda: _whole(model, strategy=balanced, recompute="off"),
    }


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (ACCUMULATION, LENGTH))
    return tokens, tokens.roll(-1, 1)


def _loop(model: nn.Module, *, compiled: bool, optimizer_too: bool) -> Step:
    own = copy.deepcopy(model)
    tokens, targets = _tokens()
    optimizer = _adamw(own)
    forward = torch.compile(own) if compiled else own
    update = torch.compile(optimizer.step) if optimizer_too else optimizer.step

    def step() -> None:
        optimizer.zero_grad()
        for rows, wanted in zip(tokens.split(1), targets.split(1), strict=True):
            (forward(rows, wanted) / ACCUMULATION).backward()
        update()

    return step


def _whole(model: nn.Module, **options: Any) -> Step:
    tokens, targets = _tokens()
    step = _compiled(model, **options)
    return lambda: step(tokens, targets)


def _compiled(model: nn.Module, **options: Any) -> ipu_dynamo.CompiledModel:
    own = copy.deepcopy(model)
    given = ipu_dynamo.Options(gradient_accumulation=ACCUMULATION, **options)
    return ipu_dynamo.compile_training(own, _adamw(own), given)

"""List the runs of both checkouts: models, ways to run them, front ends and engines.

This file runs in both, so it takes nothing of `ipu_dynamo` but the public names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import nn

from benchmarks import models
from benchmarks.models import CLASSES, VOCABULARY
from benchmarks.work import Training, by, classifying, texts
from ipu_dynamo import AutomaticLossScaling, Location, Locations, StageSpec, Strategy

Front = Literal["training", "inference", "torch_compile", "poptorch"]
Engine = Literal["eager", "inductor"]
CALLS = 3


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model, and how both checkouts run it.

    Args:
        model: a name of `MODELS`.
        strategy: a name of `STRATEGIES`.
        accumulation: micro-batches of an update; for inference, device iterations of a call.
    """

    front: Front
    model: str
    strategy: str
    accumulation: int
    engine: Engine = "eager"

    @property
    def name(self) -> str:
        """Its name in the table, the list of expected differences and on the command line."""
        return f"{self.front}/{self.model}/{self.strategy}/{self.accumulation}/{self.engine}"

    @property
    def quick(self) -> bool:
        """Whether it belongs to the quarter that is run where time is short."""
        if self.engine == "inductor":
            return False
        if self.front == "training":
            return (self.strategy, min(self.accumulation, 4)) in _QUICK
        known = self.model in ("mlp", "cnn", "dropout")
        return known and self.strategy in ("sequential", "pipelined")


def _weights_and_biases(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups, with and without weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


_SGD = by(torch.optim.SGD, lr=0.05, momentum=0.9)
_PLAIN_SGD = by(torch.optim.SGD, lr=0.05, weight_decay=0.01)
_ADAM = by(torch.optim.Adam, lr=1e-3)


def _vectors(model: models.Scored, rows: int, optimizer: Any) -> Training:
    return classifying(model, rows, CALLS, 32, optimizer=optimizer)


def _dropout(rows: int) -> Training:
    return _vectors(models.scored_mlp(lambda: nn.Dropout(0.25)), rows, _ADAM)


def _cnn(rows: int) -> Training:
    return classifying(models.scored_cnn(), rows, CALLS, 3, 8, 8, optimizer=_weights_and_biases)


def _transformer(rows: int) -> Training:
    model = models.scored_transformer()
    return classifying(model, rows, CALLS, 8, 12, optimizer=_weights_and_biases)


def _language_model(rows: int) -> Training:
    model = models.serialized_language_model()
    return Training(model, _ADAM, texts(VOCABULARY, CALLS * rows, 8), rows)


def _three_blocks(rows: int) -> Training:
    return Training(models.three_blocks(), _ADAM, texts(24, CALLS * rows, 8), rows)


def _lstm(rows: int) -> Training:
    words = torch.randint(VOCABULARY, (CALLS * rows, 4)), torch.randint(CLASSES, (CALLS * rows,))
    return Training(models.scored_lstm(), by(torch.optim.RMSprop, lr=1e-3), words, rows)


MODELS: dict[str, Callable[[int], Training]] = {  # of so many rows in each of the calls
    "mlp": lambda rows: _vectors(models.scored_mlp(), rows, _SGD),
    "cnn": _cnn,
    "transformer": _transformer,
    "language_model": _language_model,
    "half": lambda rows: _vectors(models.scored_half(), rows, _PLAIN_SGD),
    "dropout": _dropout,
    "three_blocks": _three_blocks,
    "lstm": _lstm,
    "loss_scaling": lambda rows: _vectors(models.scored_half(), rows, _ADAM),
    "checkpoints": lambda rows: _vectors(models.checkpointed_mlp(), rows, _SGD),
}
OPTIONS: dict[str, dict[str, Any]] = {  # of the core, that belong to a model
    "transformer": {"outline": True},
    "half": {"loss_scale": 64.0, "partials": "half"},
    "dropout": {"seed": 7},
    "loss_scaling": {"loss_scale": 2.0**16, "automatic_loss_scaling": AutomaticLossScaling()},
    "checkpoints": {"recompute": "all"},
}
_OFF_CHIP = Location(off_chip=True)
_SHARDED = Locations(weights=Location(sharded=True), optimizer_state=Location(sharded=True))
_ZERO_BUBBLE = Strategy(kind="pipelined", schedule="zero_bubble")
STRATEGIES: dict[str, dict[str, Any]] = {  # with options of the core
    "sequential": {},
    "pipelined": {"strategy": Strategy(kind="pipelined")},
    "workers": {"strategy": Strategy(kind="pipelined"), "workers": 2},
    "zero_bubble": {"strategy": _ZERO_BUBBLE, "workers": 2},
    "sharded": {"strategy": Strategy(kind="sharded")},
    "serial_phased": {},
    "parallel_phased": {"workers": 2},
    "replicas": {"replicas": 2},
    "sharded_state": {"replicas": 2, "locations": _SHARDED},
    "side_by_side": {"side_by_side": True, "workers": 2},
    "all_recomputed": {"recompute": "all"},
    "off_chip": {"locations": Locations(weights=_OFF_CHIP, accumulators=_OFF_CHIP)},
}
TWO_STAGES = ("pipelined", "workers", "zero_bubble", "sharded", "serial_phased", "parallel_phased")
REPLICATED = ("replicas", "sharded_state")
# Threads work at once in these: when which tensor is freed differs from run to run.
THREADED = ("workers", "zero_bubble", "side_by_side", "parallel_phased")
_NEED_ACCUMULATION = ("pipelined", "workers", "zero_bubble", "side_by_side")
_ACCUMULATION = {"three_blocks": 6}  # a pipeline of three stages needs five micro-batches
_REFUSED = {(model, "side_by_side") for model in ("cnn", "language_model", "checkpoints")}
_INDUCTOR = (
    ("training", "mlp", "sequential", 1),
    ("training", "mlp", "sequential", 4),
    ("training", "cnn", "pipelined", 4),
    ("training", "transformer", "sequential", 4),
    ("training", "language_model", "sequential", 4),
    ("training", "three_blocks", "zero_bubble", 6),
    ("training", "half", "sequential", 1),
    ("inference", "cnn", "sequential", 1),
    ("torch_compile", "transformer", "sequential", 1),
    ("poptorch", "mlp", "pipelined", 4),
)
_ONCE = {"sharded": 1, "all_recomputed": 4, "off_chip": 4}  # with one accumulation only
_QUICK = (("sequential", 4), ("pipelined", 4), ("serial_phased", 1), ("sharded_state", 4))
_OTHER_FRONTS = (  # front ends, models, strategies and accumulations, each with each
    ("inference", ("cnn", "transformer"), ("sequential", "sharded", "replicas"), (1, 4)),
    ("inference", ("cnn", "transformer"), ("pipelined",), (4,)),
    ("torch_compile", ("mlp", "transformer", "three_blocks", "dropout"), ("sequential",), (1,)),
    ("torch_compile", ("mlp", "transformer", "three_blocks", "dropout"), ("sharded",), (1,)),
    ("torch_compile", ("mlp", "transformer"), ("pipelined",), (4,)),
    ("poptorch", ("mlp", "cnn", "half", "dropout"), ("sequential",), (1,)),
    ("poptorch", ("mlp", "cnn", "half", "dropout"), ("pipelined", "replicas"), (4,)),
)


def _eager() -> Iterator[Configuration]:
    for model, strategy, accumulation in product(MODELS, STRATEGIES, (1, 4)):
        if strategy in _NEED_ACCUMULATION:
            accumulation = 0 if accumulation == 1 else _ACCUMULATION.get(model, accumulation)
        known = _ONCE.get(strategy, accumulation)
        if accumulation == known and accumulation and (model, strategy) not in _REFUSED:
            yield Configuration("training", model, strategy, accumulation)
    for front, *choices in _OTHER_FRONTS:
        for chosen in product(*choices):
            yield Configuration(front, *chosen)


CONFIGURATIONS = {
    c.name: c for c in (*_eager(), *(Configuration(*known, "inductor") for known in _INDUCTOR))
}


def options_of(configuration: Configuration, model: Any) -> dict[str, Any]:
    """The core's options of a configuration. One worker, unless the strategy has more."""
    name = configuration.strategy
    options = {"engine": configuration.engine, "workers": 1} | STRATEGIES[name]
    if name not in ("serial_phased", "parallel_phased"):
        return options
    ipus = [ipu for _, ipu in model.stages] if name == "parallel_phased" else [0, 0, 0]
    stages = [StageSpec((f"block{i}",), ipus[i]) for i in range(len(model.stages))]
    phases = tuple((stage,) for stage in stages)
    strategy = Strategy(kind=name, phases=phases, liveness="off_chip_after_fwd")
    return options | {"strategy": strategy}

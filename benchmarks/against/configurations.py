"""List what is run in both checkouts: models, ways to run them, front ends and engines.

This file runs in both, so it takes nothing of `ipu_dynamo` but the public names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.models import CLASSES, VOCABULARY
from ipu_dynamo import AutomaticLossScaling, Location, Locations, StageSpec, Strategy

Front = Literal["training", "inference", "torch_compile", "poptorch"]
Engine = Literal["eager", "inductor"]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """A model with its data, optimiser and options.

    Args:
        build: makes the model.
        data: makes a batch of so many rows; the targets are its last tensor.
        optimizer: makes its optimiser.
        options: options of the core that belong to the model.
    """

    build: Callable[[], models.Scored]
    data: Callable[[int], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What both checkouts run.

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
        """What the table, the list of expected differences and the command line call it."""
        return f"{self.front}/{self.model}/{self.strategy}/{self.accumulation}/{self.engine}"

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.model == "dropout" and self.front != "inference"

    @property
    def quick(self) -> bool:
        """Whether it belongs to the quarter that is run where time is short."""
        if self.engine == "inductor":
            return False
        if self.front == "training":
            return (self.strategy, min(self.accumulation, 4)) in _QUICK
        strategies = ("sequential", "pipelined")
        return self.model in ("mlp", "cnn", "dropout") and self.strategy in strategies


def _rows(*shape: int) -> Callable[[int], Batch]:
    """Vectors, sequences or images, and classes."""
    return lambda rows: (torch.randn(rows, *shape), torch.randint(CLASSES, (rows,)))


def _texts(vocabulary: int) -> Callable[[int], Batch]:
    """Tokens, and the ones that follow them."""

    def batch(rows: int) -> Batch:
        tokens = torch.randint(vocabulary, (rows, 8))
        return tokens, tokens.roll(-1, 1)

    return batch


def _short_texts(rows: int) -> Batch:
    """Tokens and classes."""
    return torch.randint(VOCABULARY, (rows, 4)), torch.randint(CLASSES, (rows,))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, with and without weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def _dropout() -> models.Scored:
    return models.scored_mlp(lambda: nn.Dropout(0.25))


_SCALED = {"loss_scale": 2.0**16, "automatic_loss_scaling": AutomaticLossScaling()}
_HALF = {"loss_scale": 64.0, "partials": "half"}
MODELS = {
    "mlp": Model(models.scored_mlp, _rows(32), _sgd),
    "cnn": Model(models.scored_cnn, _rows(3, 8, 8), _adamw),
    "transformer": Model(models.scored_transformer, _rows(8, 12), _adamw, {"outline": True}),
    "language_model": Model(models.serialized_language_model, _texts(VOCABULARY), _adam),
    "half": Model(models.scored_half, _rows(32), _plain_sgd, _HALF),
    "dropout": Model(_dropout, _rows(32), _adam, {"seed": 7}),
    "three_blocks": Model(models.three_blocks, _texts(24), _adam),
    "lstm": Model(models.scored_lstm, _short_texts, _rmsprop),
    "loss_scaling": Model(models.scored_half, _rows(32), _adam, _SCALED),
    "checkpoints": Model(models.checkpointed_mlp, _rows(32), _sgd, {"recompute": "all"}),
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


def options_of(configuration: Configuration, model: models.Scored) -> dict[str, Any]:
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

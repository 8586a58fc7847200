"""List what is run in both checkouts: models, ways to run them, front ends and engines."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

Front = Literal["training", "inference", "torch_compile", "poptorch"]
Engine = Literal["eager", "inductor"]

MODELS = (
    "mlp",
    "cnn",
    "transformer",
    "language_model",
    "half",
    "dropout",
    "three_blocks",
    "lstm",
    "loss_scaling",
    "checkpoints",
)
RANDOM = ("dropout",)  # models that draw random numbers
TWO_STAGES = ("pipelined", "workers", "zero_bubble", "sharded", "serial_phased", "parallel_phased")
REPLICATED = ("replicas", "sharded_state")
STRATEGIES = ("sequential", *TWO_STAGES, *REPLICATED, "side_by_side", "all_recomputed", "off_chip")
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
        return self.model in RANDOM and self.front != "inference"


def configurations(*, quick: bool, models: tuple[str, ...] = MODELS) -> list[Configuration]:
    """All of them, or about a quarter, on the eager engine: each model, each front end."""
    found = [*_eager(), *(Configuration(*known, engine="inductor") for known in _INDUCTOR)]
    return [c for c in found if c.model in models and (_quick(c) or not quick)]


def _eager() -> Iterator[Configuration]:
    for model, strategy, accumulation in product(MODELS, STRATEGIES, (1, 4)):
        if strategy in _NEED_ACCUMULATION:
            accumulation = 0 if accumulation == 1 else _ACCUMULATION.get(model, accumulation)
        known = _ONCE.get(strategy, accumulation)
        if accumulation == known and accumulation and (model, strategy) not in _REFUSED:
            yield Configuration("training", model, strategy, accumulation)
    for model, strategy in product(("cnn", "transformer"), ("sequential", "sharded", "replicas")):
        yield Configuration("inference", model, strategy, 1)
        yield Configuration("inference", model, strategy, 4)
    for model in ("cnn", "transformer"):
        yield Configuration("inference", model, "pipelined", 4)
    for model in ("mlp", "transformer", "three_blocks", "dropout"):
        yield Configuration("torch_compile", model, "sequential", 1)
        yield Configuration("torch_compile", model, "sharded", 1)
    for model in ("mlp", "transformer"):
        yield Configuration("torch_compile", model, "pipelined", 4)
    for model in ("mlp", "cnn", "half", "dropout"):
        yield Configuration("poptorch", model, "sequential", 1)
        yield Configuration("poptorch", model, "pipelined", 4)
        yield Configuration("poptorch", model, "replicas", 4)


def _quick(configuration: Configuration) -> bool:
    if configuration.engine == "inductor":
        return False
    strategy, accumulation = configuration.strategy, configuration.accumulation
    if configuration.front == "training":
        return (strategy, min(accumulation, 4)) in _QUICK
    return configuration.model in ("mlp", "cnn", "dropout") and strategy in (
        "sequential",
        "pipelined",
    )

"""Make a configuration's model and the call that trains or runs it, through its front end."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import Location, Locations, Options, StageSpec, Strategy

from .configurations import REPLICATED, TWO_STAGES, Configuration
from .models import CASES, Batch

MICRO_BATCH = 4  # rows
_OFF_CHIP = Location(off_chip=True)
_SHARDED = Location(sharded=True)
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "sequential": {},
    "pipelined": {"strategy": Strategy(kind="pipelined")},
    "workers": {"strategy": Strategy(kind="pipelined"), "workers": 2},
    "zero_bubble": {"strategy": Strategy(kind="pipelined", schedule="zero_bubble"), "workers": 2},
    "sharded": {"strategy": Strategy(kind="sharded")},
    "replicas": {"replicas": 2},
    "sharded_state": {
        "replicas": 2,
        "locations": Locations(weights=_SHARDED, optimizer_state=_SHARDED),
    },
    "side_by_side": {"side_by_side": True, "workers": 2},
    "all_recomputed": {"recompute": "all"},
    "off_chip": {"locations": Locations(weights=_OFF_CHIP, accumulators=_OFF_CHIP)},
}


@dataclass(frozen=True)
class Running:
    """A configuration that is ready to be called.

    Args:
        call: one training step, or one inference; returns tensors.
        batches: what to call it with, in turn.
        left: what lasts, once called: tensors by name, under "weights", "buffers", "states".
    """

    call: Callable[..., Any]
    batches: tuple[Batch, ...]
    left: Callable[[], dict[str, dict[str, Any]]]


def make(configuration: Configuration, calls: int) -> Running:
    """Build the model with fixed random numbers; nothing is compiled before the first call."""
    case = CASES[configuration.model]
    torch.manual_seed(0)
    model = case.build()
    replicas = 2 if configuration.strategy in REPLICATED else 1
    rows = MICRO_BATCH * configuration.accumulation * replicas
    batches = tuple(case.data(rows) for _ in range(calls))
    if configuration.strategy in TWO_STAGES:
        for index, (layer, ipu) in enumerate(model.stages):
            ipu_dynamo.BeginBlock(layer, f"block{index}", ipu_id=ipu)
    return _FRONTS[configuration.front](configuration, model, batches)


def _training(
    configuration: Configuration, model: nn.Module, batches: tuple[Batch, ...]
) -> Running:
    case = CASES[configuration.model]
    optimizer = case.optimizer(model)
    options = _options(configuration, model)
    options |= {"gradient_accumulation": configuration.accumulation}
    step = ipu_dynamo.compile_training(model, optimizer, Options(**case.options | options), loss=0)

    def left() -> dict[str, dict[str, Any]]:
        step.read_optimizer_state()
        scale = {"loss scale": step.loss_scale}
        return _tensors(model) | {"states": optimizer.state_dict()["state"] | scale}

    return Running(step, batches, left)


def _inference(
    configuration: Configuration, model: nn.Module, batches: tuple[Batch, ...]
) -> Running:
    options = _options(configuration, model) | {"device_iterations": configuration.accumulation}
    run = ipu_dynamo.compile_inference(model.eval(), Options(**options))
    return Running(run, tuple(batch[:-1] for batch in batches), lambda: _tensors(model))


def _torch_compile(
    configuration: Configuration, model: nn.Module, batches: tuple[Batch, ...]
) -> Running:
    """The usual loop; the accumulation is that of micro-batches in a pipeline."""
    optimizer = CASES[configuration.model].optimizer(model)
    options: dict[str, Any] = {"engine": configuration.engine, "workers": 1}
    if configuration.accumulation > 1:
        options["micro_batches"] = configuration.accumulation
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ipu", fullgraph=True, options=options)

    def step(*batch: Tensor) -> Any:
        optimizer.zero_grad()
        returned = compiled(*batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()
        optimizer.step()
        return returned

    return Running(
        step, batches, lambda: _tensors(model) | {"states": optimizer.state_dict()["state"]}
    )


def _poptorch(
    configuration: Configuration, model: nn.Module, batches: tuple[Batch, ...]
) -> Running:
    import poptorch

    options = poptorch.Options()
    options.Training.gradientAccumulation(configuration.accumulation)
    options.randomSeed(7)
    if configuration.strategy in TWO_STAGES:
        options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    if configuration.strategy in REPLICATED:
        options.replicationFactor(2)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, loss_scaling=2.0)
    executor = poptorch.trainingModel(model, options, optimizer)

    def step(*batch: Tensor) -> Any:
        with _engine_of_environment(configuration.engine):
            return executor(*batch)

    def left() -> dict[str, dict[str, Any]]:
        executor.copyWeightsToHost()
        return _tensors(model) | {"states": optimizer.state_dict()}

    return Running(step, batches, left)


_FRONTS = {
    "training": _training,
    "inference": _inference,
    "torch_compile": _torch_compile,
    "poptorch": _poptorch,
}


def _options(configuration: Configuration, model: nn.Module) -> dict[str, Any]:
    """The core's options of a configuration. One worker, unless the strategy has more."""
    name = configuration.strategy
    options: dict[str, Any] = {"engine": configuration.engine, "workers": 1}
    if name not in ("serial_phased", "parallel_phased"):
        return options | _OPTIONS[name]
    ipus = [ipu for _, ipu in model.stages] if name == "parallel_phased" else [0, 0, 0]
    stages = [StageSpec((f"block{i}",), ipus[i]) for i in range(len(model.stages))]
    phases = tuple((stage,) for stage in stages)
    liveness = "off_chip_after_fwd"
    workers = 2 if name == "parallel_phased" else 1
    strategy = Strategy(kind=name, phases=phases, liveness=liveness)
    return options | {"strategy": strategy, "workers": workers}


def _tensors(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        "weights": {name: p.detach() for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


@contextmanager
def _engine_of_environment(engine: str) -> Iterator[None]:
    """Choose the engine where a front end has no option for it."""
    before = os.environ.get("IPU_DYNAMO_ENGINE")
    os.environ["IPU_DYNAMO_ENGINE"] = engine
    try:
        yield
    finally:
        if before is None:
            del os.environ["IPU_DYNAMO_ENGINE"]
        else:
            os.environ["IPU_DYNAMO_ENGINE"] = before

"""Run configurations in one checkout, as told by the other process: graphs, bits, memory, times."""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_flatten_with_path

import ipu_dynamo
from benchmarks.against.configurations import (
    CONFIGURATIONS,
    MODELS,
    OPTIONS,
    REPLICATED,
    THREADED,
    TWO_STAGES,
    Configuration,
    options_of,
)
from benchmarks.against.graphs import Recorder
from benchmarks.measure import Step, clock
from benchmarks.work import Training, program

MICRO_BATCH = 4  # rows
Left = dict[str, dict[str, Any]]  # tensors by name, under "weights", "buffers", "states"
Front = tuple[Callable[..., Any], Callable[[], Left]]  # a call, and what lasts, once called


class Runner:
    """Run the configurations of a checkout, one at a time.

    Args:
        root: the checkout; any other's packages are refused.
    """

    def __init__(self, root: str) -> None:
        _check_checkout(Path(root))
        self._recorder = Recorder()
        self._step: Step | None = None
        gc.freeze()  # modules need no look at every collection

    def run(self, name: str) -> dict[str, Any]:
        """Train a configuration: its graphs, digests of its bits, its peak; or the error."""
        self._step = None
        gc.collect()
        self._recorder.clear()
        known = set(self._recorder.texts)
        start = time.perf_counter()
        try:
            bits, peak = self._train(CONFIGURATIONS[name])
        except Exception as error:  # both checkouts are to go on with the next one
            self._step = None
            return {"error": f"{type(error).__name__}: {error}"}
        return {
            "graphs": dict(self._recorder.counts),
            "texts": {k: t for k, t in self._recorder.texts.items() if k not in known},
            "bits": bits,
            "peak": peak,
            "first": time.perf_counter() - start,
        }

    def seconds(self, calls: int) -> float:
        """Seconds per call of the last configuration."""
        assert self._step is not None, "the last configuration has failed"
        return clock(self._step)(calls)

    def _train(self, configuration: Configuration) -> tuple[dict[str, str], int | None]:
        """Call it three times: digests of its results, and the peak of the last call."""
        work = _training_of(configuration)
        call, left = _FRONTS[configuration.front](configuration, work)
        batches = work.micro_batches()
        if configuration.front == "inference":
            batches = [batch[:-1] for batch in batches]
        torch.manual_seed(1)
        *first, last = batches
        returned: list[Any] = [call(*batch) for batch in first]
        peak = None
        if configuration.strategy in THREADED:
            returned.append(call(*last))
        else:
            peak = allocated_at_peak(lambda: returned.append(call(*last)))
        in_turn = itertools.cycle(batches)
        self._step = lambda: call(*next(in_turn))
        kinds = {"outputs": returned, **left()}
        return {kind: _digest(values) for kind, values in kinds.items()}, peak


def _training_of(configuration: Configuration) -> Training:
    """A training with fixed random numbers; nothing is compiled before the first call."""
    torch.manual_seed(0)
    rows = MICRO_BATCH * configuration.accumulation
    work = MODELS[configuration.model](rows * (2 if configuration.strategy in REPLICATED else 1))
    if configuration.strategy in TWO_STAGES:
        for index, (layer, ipu) in enumerate(work.model.stages):
            ipu_dynamo.BeginBlock(work.model.layers[layer], f"block{index}", ipu_id=ipu)
    return work


def _training(configuration: Configuration, work: Training) -> Front:
    options = OPTIONS.get(configuration.model, {}) | options_of(configuration, work.model)
    options |= {"gradient_accumulation": configuration.accumulation, "device_iterations": 1}
    optimizer = work.optimizer(work.model)
    step = program(work, optimizer, loss=0, **options)

    def left() -> Left:
        step.read_optimizer_state()
        scale = {"loss scale": step.loss_scale}
        return _tensors(work.model) | {"states": optimizer.state_dict()["state"] | scale}

    return step, left


def _inference(configuration: Configuration, work: Training) -> Front:
    options = options_of(configuration, work.model)
    options |= {"device_iterations": configuration.accumulation}
    run = ipu_dynamo.compile_inference(work.model.eval(), ipu_dynamo.Options(**options))
    return run, lambda: _tensors(work.model)


def _torch_compile(configuration: Configuration, work: Training) -> Front:
    """The usual loop; the accumulation is that of micro-batches in a pipeline."""
    optimizer = work.optimizer(work.model)
    options: dict[str, Any] = {"engine": configuration.engine, "workers": 1}
    if configuration.accumulation > 1:
        options["micro_batches"] = configuration.accumulation
    torch.compiler.reset()
    compiled = torch.compile(work.model, backend="ipu", fullgraph=True, options=options)

    def step(*batch: Tensor) -> Any:
        optimizer.zero_grad()
        returned = compiled(*batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()
        optimizer.step()
        return returned

    return step, lambda: _tensors(work.model) | {"states": optimizer.state_dict()["state"]}


def _poptorch(configuration: Configuration, work: Training) -> Front:
    """PopTorch's own optimiser; the environment chooses the engine, as no option does."""
    import poptorch

    options = poptorch.Options()
    options.Training.gradientAccumulation(configuration.accumulation)
    options.randomSeed(7)
    if configuration.strategy in TWO_STAGES:
        options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    if configuration.strategy in REPLICATED:
        options.replicationFactor(2)
    settings = {"lr": 0.05, "momentum": 0.9, "loss_scaling": 2.0}
    optimizer = poptorch.optim.SGD(work.model.parameters(), **settings)
    executor = poptorch.trainingModel(work.model, options, optimizer)

    def step(*batch: Tensor) -> Any:
        with patch.dict(os.environ, IPU_DYNAMO_ENGINE=configuration.engine):
            return executor(*batch)

    def left() -> Left:
        executor.copyWeightsToHost()
        return _tensors(work.model) | {"states": optimizer.state_dict()}

    return step, left


_FRONTS = {
    "training": _training,
    "inference": _inference,
    "torch_compile": _torch_compile,
    "poptorch": _poptorch,
}


def _tensors(model: nn.Module) -> Left:
    return {
        "weights": {name: p.detach() for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def _digest(values: object) -> str:
    """A digest of every bit in nested tensors and numbers, and of where they are."""
    digest = sha256()
    for path, leaf in tree_flatten_with_path(values)[0]:
        digest.update(repr(path).encode())
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]


def allocated_at_peak(work: Callable[[], object]) -> int:
    """Bytes that `work` holds at its peak beyond those held before it, in this thread.

    They are counted as PyTorch's allocator hands them out, so the same work has the same peak in
    every run, which resident memory has not.
    """
    gc.collect()
    gc.disable()  # a collection in the middle would free memory of the last call
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
    finally:
        gc.enable()
    results = profiled.profiler.kineto_results
    live: dict[int, int] = {}  # bytes of the blocks that `work` has taken, by address
    held = peak = 0
    for _, nbytes, address in sorted(_allocations(results.experimental_event_tree())):
        if nbytes > 0:
            live[address] = nbytes
            held += nbytes
        else:  # PyTorch notes by chance only that a block was freed that is older than `work`
            held -= live.pop(address, 0)
        peak = max(peak, held)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """When memory was taken (or, if negative, freed), how many bytes, and where."""
    for event in events:
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            yield event.start_time_ns, fields.alloc_size, fields.ptr
        yield from _allocations(event.children)


def _check_checkout(root: Path) -> None:
    """Refuse to measure another checkout than the one that was named."""
    import ipu_dynamo.passes
    import ipu_dynamo.runtime
    import poptorch

    for package in (ipu_dynamo, ipu_dynamo.passes, ipu_dynamo.runtime, poptorch):
        (found,) = package.__path__
        if root.resolve() not in Path(found).resolve().parents:
            raise SystemExit(f"{package.__name__} is {found}, not part of {root}")

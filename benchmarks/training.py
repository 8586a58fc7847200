"""Time training steps: those of PyTorch, of both doors, and ours by itself.

Small models, a language model of the GPT-2 kind, pipelines of two stages, half precision, recurrent
layers, and calls through torch.compile. Some figures are about one contender alone; those are
functions that return them.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import ipu_dynamo
from benchmarks import models, peak_memory, ranks
from benchmarks.jax_peer import JAX, trained, with_installed
from benchmarks.measure import Maker, Step, clock
from benchmarks.products import products_alone
from benchmarks.torch_pipelining import torch_pipeline
from benchmarks.work import (
    LANGUAGE_MODEL,
    Training,
    classifying,
    head_in_parts,
    language_model,
    loop,
    program,
    small_language_model,
    trained_in_stages,
    whole,
    without_gradient,
)
from ipu_dynamo.ops.precision import half_partial_sums as half_partials
from ipu_dynamo.runtime.engines.replay.replay import Repetition, Replay
from ipu_dynamo.runtime.execute.timeline import Timeline

LAYERS = LANGUAGE_MODEL[0]
SECOND = 1 + LAYERS // 2  # the number of the layer that begins the second stage of a pipeline
PLAIN = {"inference": "eager", "training": "aot_eager"}  # PyTorch's backends beside ours
WAYS: dict[str, Callable[[Training], Step]] = {
    "eager": loop,
    "torch.compile": partial(loop, compile_model=torch.compile),
    "torch.compile, optimiser too": partial(loop, compile_model=torch.compile, optimizer_too=True),
    "torch.compile, ipu": partial(loop, compile_model=partial(torch.compile, backend="ipu")),
    "products alone": lambda work: products_alone(program(work), *work.inputs),
    JAX: trained,
    "not outlined": partial(whole, outline=False),
    "side by side": partial(whole, side_by_side=True),
    "compile_training": whole,
}  # how to train


def contend(make: Callable[[], Training], *ways: str) -> Mapping[str, Maker]:
    """Steps of a training in some of the ways of `WAYS`; JAX takes part where it is installed."""
    work = make()
    return with_installed({way: partial(WAYS[way], work) for way in ways})


def all_cuts() -> Mapping[str, Maker]:
    """A pipeline of two stages on two cores: cut before each layer, and where it is balanced."""
    work = language_model()

    def eager_on_one_core() -> Step:
        torch.set_num_threads(1)
        return loop(work)

    def cut_before(layer: int) -> Step:
        behind_words_and_places = work.model.layers[2 + layer]
        ipu_dynamo.BeginBlock(behind_words_and_places, ipu_id=1)
        return whole(work, strategy=ipu_dynamo.Strategy(kind="pipelined"), recompute="off")

    balanced = ipu_dynamo.Strategy(kind="pipelined", ipus=2)
    return {
        "eager, one core": eager_on_one_core,
        **{f"cut before layer {n}": partial(cut_before, n) for n in range(1, LAYERS)},
        "cut before the head": partial(cut_before, LAYERS),
        "balanced": partial(whole, work, strategy=balanced, recompute="off"),
    }


def overhead(steps: int = 1000) -> dict[str, float]:
    """Time a device iteration without its kernels and matmuls, in microseconds.

    Those are repeated on the same micro-batches, cut before; their rows come from main memory in
    both. One thread computes, since several would wait for each other after every operator.
    """
    torch.set_num_threads(1)
    work = classifying(models.perceptron(64, 128, 10), 32, steps, 64)
    run, (x, y) = program(work), work.inputs
    run(x, y)
    executable = run.executable
    assert executable.fused is not None
    now = executable.fused.prepare([[0.01, 0.0, 0.0, 0.0]]).function
    assert isinstance(now.replay, Replay), now.replay
    rows = (x.split(32), y.split(32))
    received = [rows[place] for place in now.places]
    numbers = [torch.tensor(0.01, dtype=torch.float64) for _ in now.fused.hyperparameters]
    sent = [[torch.empty(())] * steps for _ in now.fused.sent]

    def bare() -> float:
        assert isinstance(now.replay, Replay)
        made = Repetition(
            now.replay, now.stored_tensors, now.constants, numbers, received, sent, steps
        )
        start = time.perf_counter()
        made.advance(steps, 60.0)
        return time.perf_counter() - start

    with torch.no_grad():
        call = clock(lambda: run(x, y))
        rounds = [(1e6 * call(1) / steps, 1e6 * bare() / steps) for _ in range(75)]
    iterations, beside = [a for a, _ in rounds], [a - b for a, b in rounds]
    return {
        "microseconds of a device iteration of the MLP, 1 thread": statistics.median(iterations),
        "microseconds of it beside what it calls": statistics.median(beside),
    }


def two_stages() -> dict[str, Maker]:
    """A step of 8 micro-batches. Eager has all cores, a worker or process one intra-op thread."""
    work = small_language_model()
    return {
        "eager": partial(loop, work),
        "torch pipelining": partial(torch_pipeline, "benchmarks.work:small_language_model", SECOND),
        "1 worker": partial(_pipelined, whole, work, workers=1),
        **ranks.trained("benchmarks.work:small_pipeline", "mesh of 2 IPUs"),
        "2 workers, zero bubble": partial(_pipelined, whole, work, schedule="zero_bubble"),
        "2 workers": partial(_pipelined, whole, work),
    }


def two_stages_adamw() -> dict[str, Maker]:
    """A step of 8 micro-batches with the options that a user has if she sets none."""
    work = trained_in_stages()
    ours = partial(_pipelined, whole, work, recompute="auto")
    return {
        "eager": partial(loop, work),
        "torch pipelining": partial(torch_pipeline, "benchmarks.work:trained_in_stages", SECOND),
        "2 workers, eager engine": partial(ours, engine="eager"),
        "2 workers, recomputing": partial(ours, force={"KeepValues": False}),
        "2 workers": ours,
    }


def processor_time(pairs: int = 5) -> dict[str, float]:
    """What a pipeline spends beside one stage that runs the same micro-batches in turn.

    Processor seconds of a step: on both engines, with one intra-op thread.
    """
    torch.set_num_threads(1)

    def spent(step: Step) -> float:
        begun = time.process_time()
        step()
        return time.process_time() - begun

    def ratio(engine: Any) -> float:
        steps = [
            _pipelined(whole, trained_in_stages(), recompute="auto", engine=engine),
            whole(trained_in_stages(), side_by_side=False, engine=engine),
        ]
        for step in steps * 3:
            step()
        return statistics.median(spent(steps[0]) / spent(steps[1]) for _ in range(pairs))

    return {
        f"processor time of the pipeline over that of one stage, {engine} engine": ratio(engine)
        for engine in ("eager", "inductor")
    }


def idle_shares(steps: int = 20) -> dict[str, float]:
    """How the two workers spend a step, from timelines of real ones: medians of shares."""
    work = small_language_model()
    run = _pipelined(program, work)
    for _ in range(3):
        run(*work.inputs)
    busy, idle = [], []
    for _ in range(steps):
        line = run.executable.timeline = Timeline()
        run(*work.inputs)
        busy.append(line.busy_at_once(2))
        idle.append(1 - statistics.mean(line.busy().values()))
    return {
        "both workers busy, of the steady state": statistics.median(busy),
        "workers idle": statistics.median(idle),
        "workers idle by the schedule": run.executable.schedule.idle,
    }


def _pipelined(
    make: Any, work: Training, *, workers: int = 2, schedule: Any = "grouped", **options: Any
) -> Any:
    """Call `make` with a training in two stages."""
    ipu_dynamo.BeginBlock(work.model.layers[SECOND], ipu_id=1)
    strategy = ipu_dynamo.Strategy(kind="pipelined", schedule=schedule)
    # as the others, who keep what forward made
    options = {"recompute": "off"} | options
    return make(work, strategy=strategy, workers=workers, **options)


def partial_sums() -> dict[str, Maker]:
    """A product: in float32, then of halves with half partial sums over so many columns."""
    a, b = torch.randn(512, 4096), torch.randn(4096, 512)
    halves = a.half(), b.half()
    return {
        "float32": lambda: partial(torch.mm, a, b),
        **{
            f"half partials, chunk {chunk}": partial(partial, half_partials.matmul, *halves, chunk)
            for chunk in (16, 64, 128)
        },
    }


def half_language_model() -> Training:
    """The small language model in float16."""
    work = small_language_model()
    return replace(work, model=work.model.half())


def serialized_head(_: peak_memory.Found) -> Mapping[str, Maker]:
    """Steps of an embedding, a layer, and a product with the embedding's matrix in parts."""

    modes = ("none", "output_channels", "input_channels")
    return {mode: lambda mode=mode: whole(head_in_parts(mode)) for mode in modes}


def door(kind: str, layers: int, *between: type[nn.Module]) -> dict[str, Maker]:
    """Calls of a tiny model through torch.compile, beside one of PyTorch's backends.

    The arithmetic takes a few microseconds, so a call is mostly its wrappers. Inference is compared
    with `eager`, which runs the graph that Dynamo captured. Forward and backward are compared with
    `aot_eager`, which has autograd's wrappers as well; their gradients are kept, as between steps.
    """
    settings: dict[str, dict[str, Any]] = {
        f"backend {PLAIN[kind]}": {"backend": PLAIN[kind]},
        "ipu, eager engine": {"backend": "ipu", "options": {"engine": "eager"}},
        "ipu": {"backend": "ipu"},
    }

    def step(given: dict[str, Any]) -> Step:
        model, x = nn.Sequential(*models.dense([8] * (layers + 1), *between)), torch.randn(4, 8)
        call = torch.compile(model, fullgraph=True, isolate_recompiles=True, **given)
        if kind == "inference":
            return without_gradient(call, x)
        return lambda: call(x).sum().backward()

    return {name: partial(step, given) for name, given in settings.items()}

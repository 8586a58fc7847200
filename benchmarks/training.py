"""Time training steps: those of PyTorch, of both doors, and ours by itself.

Small models, a language model of the GPT-2 kind, pipelines of two stages, half precision and
recurrent layers. Some figures are about one contender alone; those are functions that return them.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ipu_dynamo
from benchmarks import models
from benchmarks.child import in_fresh_child
from benchmarks.jax_peer import trained, with_jax
from benchmarks.measure import Maker, Step, clock
from benchmarks.models import CLASSES, WithLoss
from benchmarks.products import products_alone
from benchmarks.torch_pipelining import torch_pipeline
from benchmarks.work import (
    Optimizer,
    Training,
    adamw,
    loop,
    program,
    sgd,
    sgd_with_momentum,
    whole,
)
from ipu_dynamo.ops.precision import half_partial_sums as half_partials
from ipu_dynamo.runtime.engines.replay.replay import Repetition, Replay
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.torch_compile.backend import ipu

WIDTH, LENGTH, LAYERS, ACCUMULATION = 256, 128, 4, 8  # of the language models
VOCABULARY, SMALL_VOCABULARY, MICRO_BATCH = 8192, 64, 2  # the small one is that of pipelines
SECOND = 1 + LAYERS // 2  # the number of the layer that begins the second stage of a pipeline
M, K, N = 512, 4096, 512  # of products in half precision
RATIO = "ipu_dynamo float16's distance over eager float16's"
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
RECURRENT_LAYERS, RECURRENT_WIDTH, BATCH, STEPS = 2, 128, 32, 100
LENGTHS = 10, 1000  # of sequences whose first calls are compared
_Product = Callable[[Tensor, Tensor], Tensor]


def mlp() -> Mapping[str, Maker]:
    """A perceptron, where what surrounds the arithmetic counts."""
    work = classifying(models.perceptron(64, 128, CLASSES), 32, 200, 64)
    return with_jax(_contenders(work), partial(trained, work))


def mlp_784() -> Mapping[str, Maker]:
    """One whose weights and states fill a cache."""
    model = models.perceptron(784, 128, CLASSES)
    work = classifying(model, 16, 50, 784, optimizer=sgd_with_momentum)
    return with_jax(_contenders(work), partial(trained, work))


def mnist() -> Mapping[str, Maker]:
    """The network of PopTorch's first tutorial, on images of 28 x 28."""
    work = classifying(models.mnist(), 8, 50, 1, 28, 28, optimizer=sgd_with_momentum)
    return with_jax(_contenders(work), partial(trained, work))


def small_images() -> Mapping[str, Maker]:
    """A small convolutional network, one step in a call."""
    model = models.small_images()
    return _contenders(classifying(model, 32, 1, 1, 8, 8, optimizer=sgd_with_momentum))


def one_core() -> Mapping[str, Maker]:
    """A small language model of the GPT-2 kind, 8 micro-batches; everybody has one thread."""
    work = language_model()
    contenders: dict[str, Maker] = {
        "eager": partial(loop, work),
        "torch.compile": partial(loop, work, torch.compile),
        "torch.compile, optimiser too": partial(loop, work, torch.compile, optimizer_too=True),
        "products alone": lambda: products_alone(program(work), *work.inputs),
        "compile_training": partial(whole, work),
    }
    return with_jax(contenders, partial(trained, work))


def two_cores() -> Mapping[str, Maker]:
    """The same with two threads inside operators, or two micro-batches at once."""
    work = language_model()
    return {
        "eager": partial(loop, work),
        "torch.compile": partial(loop, work, torch.compile),
        "compile_training, side by side": partial(whole, work, side_by_side=True),
        "compile_training": partial(whole, work),
    }


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


def outlined(layers: int) -> Mapping[str, Maker]:
    """Steps of an encoder of equal layers, which are one function of the program or not."""
    inputs = torch.randn(2, 4, 64, WIDTH).unbind()
    work = Training(models.encoder(layers, WIDTH), adamw, inputs, 4)
    return {
        "not outlined": partial(whole, work, outline=False),
        "compile_training": partial(whole, work),
    }


def classifying(
    model: WithLoss, rows: int, steps: int, *shape: int, optimizer: Optimizer = sgd
) -> Training:
    """Random data of `shape` and classes: `steps` steps of `rows` rows in a call."""
    count = rows * steps
    inputs = torch.randn(count, *shape), torch.randint(CLASSES, (count,))
    return Training(model, optimizer, inputs, rows)


def language_model() -> Training:
    """Tokens of one text a micro-batch, and AdamW."""
    tokens = torch.randint(VOCABULARY, (ACCUMULATION, LENGTH))
    model = models.tied_language_model(LAYERS, VOCABULARY, WIDTH, LENGTH)
    return Training(model, adamw, (tokens, tokens.roll(-1, 1)), 1, ACCUMULATION)


def overhead(steps: int = 1000) -> dict[str, float]:
    """Time a device iteration without its kernels and matmuls, in microseconds.

    Those are repeated on the same micro-batches, cut before; their rows come from main memory in
    both. One thread computes, since several would wait for each other after every operator.
    """
    torch.set_num_threads(1)
    work = classifying(models.perceptron(64, 128, CLASSES), 32, steps, 64)
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
        made = Repetition(now.replay, now.homes, now.constants, numbers, received, sent, steps)
        start = time.perf_counter()
        made.advance(steps, 60.0)
        return time.perf_counter() - start

    with torch.no_grad():
        call = clock(lambda: run(x, y))
        rounds = [(1e6 * call(1) / steps, 1e6 * bare() / steps) for _ in range(75)]
    return {
        "microseconds of a device iteration of the MLP, 1 thread": statistics.median(
            a for a, _ in rounds
        ),
        "microseconds of it beside what it calls": statistics.median(a - b for a, b in rounds),
    }


def _contenders(work: Training) -> dict[str, Maker]:
    """Those of a small model, several steps in a call."""
    return {
        "eager": partial(loop, work),
        "torch.compile, Inductor": partial(loop, work, torch.compile),
        "torch.compile, optimiser too": partial(loop, work, torch.compile, optimizer_too=True),
        "torch.compile, ipu": partial(loop, work, partial(torch.compile, backend=ipu)),
        "products alone": lambda: products_alone(program(work), *work.inputs),
        "compile_training": partial(whole, work),
    }


def two_stages() -> dict[str, Maker]:
    """A step of 8 micro-batches. Eager has all cores, a worker or process one intra-op thread."""
    work = small_language_model()
    layers = work.model.layers
    halves = layers[:SECOND], layers[SECOND:]
    return {
        "eager": partial(loop, work),
        "torch pipelining": lambda: torch_pipeline(
            halves, work.model.loss, *work.inputs, micro_batches=ACCUMULATION
        ),
        "1 worker": partial(_pipelined, whole, work, workers=1),
        "2 workers, zero bubble": partial(_pipelined, whole, work, schedule="zero_bubble"),
        "2 workers": partial(_pipelined, whole, work),
    }


def idle_shares(steps: int = 20) -> dict[str, float]:
    """How the two workers spend a step, from timelines of real ones: medians of shares."""
    work = small_language_model()
    run = _pipelined(program, work)
    for _ in range(3):
        run(*work.inputs)
    lines = []
    for _ in range(steps):
        run.executable.timeline = Timeline()
        run(*work.inputs)
        lines.append(run.executable.timeline)
    idle = [1 - statistics.mean(line.busy().values()) for line in lines]
    return {
        "both workers busy, of the steady state": statistics.median(
            line.busy_at_once(2) for line in lines
        ),
        "workers idle": statistics.median(idle),
        "workers idle by the schedule": run.executable.schedule.idle,
    }


def small_language_model() -> Training:
    """8 micro-batches of two texts: tokens, and the ones that follow them."""
    tokens = torch.randint(SMALL_VOCABULARY, (MICRO_BATCH * ACCUMULATION, LENGTH))
    model = models.plain_language_model(LAYERS, SMALL_VOCABULARY, WIDTH)
    return Training(model, sgd, (tokens, tokens.roll(-1, 1)), MICRO_BATCH, ACCUMULATION)


def _pipelined(make: Any, work: Training, *, workers: int = 2, schedule: Any = "grouped") -> Any:
    """Call `make` with a training in two stages."""
    ipu_dynamo.BeginBlock(work.model.layers[SECOND], ipu_id=1)
    strategy = ipu_dynamo.Strategy(kind="pipelined", schedule=schedule)
    # as the others, who keep what forward made
    return make(work, strategy=strategy, recompute="off", workers=workers)


def partial_sums() -> dict[str, Maker]:
    """A product and its two gradients: in float32, then of halves with half partial sums."""
    a, b, gradient = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    halves = (a.half(), b.half(), gradient.half())
    return {
        "float32": lambda: _products(torch.mm, a, b, gradient),
        **{
            f"half partials, chunk {chunk}": partial(_products, _chunked(chunk), *halves)
            for chunk in (16, 64, 128)
        },
    }


def half_training() -> dict[str, Maker]:
    """A step of a small language model in float16: 8 micro-batches, SGD."""
    work = _half_language_model()
    return {
        "eager float16": partial(loop, work),
        "ipu_dynamo float16": partial(whole, work),
    }


def distances(steps: int = 50) -> dict[str, float]:
    """Distances of weights trained in float16 from those trained in float64, a norm over all.

    All begin with the same halves, and make steps of two micro-batches with SGD.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = _half_language_model()
    inputs = tuple(tensor[: 2 * MICRO_BATCH] for tensor in work.inputs)
    work = replace(work, optimizer=_fast_sgd, inputs=inputs, accumulation=2)
    start = work.model
    exact, eager, own = copy.deepcopy(start).double(), copy.deepcopy(start), copy.deepcopy(start)
    for make, model in ((loop, exact), (loop, eager), (whole, own)):
        step = make(replace(work, model=model))
        for _ in range(steps):
            step()
    way, of_eager, of_own = (_distance(model, exact) for model in (start, eager, own))
    return {
        f"eager float16, off after {steps} steps, over the way of float64": of_eager / way,
        f"ipu_dynamo float16, off after {steps} steps, over the same way": of_own / way,
        RATIO: of_own / of_eager,
    }


def _half_language_model() -> Training:
    work = small_language_model()
    return replace(work, model=work.model.half())


def _fast_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _products(product: _Product, a: Tensor, b: Tensor, gradient: Tensor) -> Step:
    def step() -> None:
        product(a, b)
        product(gradient, b.t())
        product(a.t(), gradient)

    return step


def _distance(model: nn.Module, exact: nn.Module) -> float:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    off = [(ours.detach().double() - theirs.detach()).norm() for ours, theirs in pairs]
    return torch.stack(off).norm().item()


def _chunked(chunk: int) -> _Product:
    return lambda a, b: half_partials.matmul(a, b, chunk)


def first_calls() -> dict[str, float]:
    """Seconds of a first call, each in a process of its own with nothing compiled before."""
    found = {}
    for kind in KINDS:
        # The step is part of the call, and threads would wait for each other.
        short, long = (
            in_fresh_child("benchmarks.training:first_call", kind, steps, OMP_NUM_THREADS="1")
            for steps in LENGTHS
        )
        found[f"{kind}, {LENGTHS[0]} steps, s"] = short
        found[f"{kind}, {LENGTHS[1]} steps, times that"] = long / short
    return found


def first_call(kind: str, steps: int) -> float:
    """Seconds of a first call in this process."""
    call = whole(_recurrent(kind, steps))
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _recurrent(kind: str, steps: int = STEPS) -> Training:
    batch = torch.randn(2, steps, BATCH, RECURRENT_WIDTH).unbind()
    return Training(
        models.recurrent(KINDS[kind], RECURRENT_LAYERS, RECURRENT_WIDTH), sgd, batch, BATCH, axis=1
    )


def recurrent(kind: str) -> Mapping[str, Maker]:
    """Recurrent layers of a kind beside plain PyTorch."""
    work = _recurrent(kind)
    both: dict[str, Maker] = {"PyTorch": partial(loop, work), "ipu_dynamo": partial(whole, work)}
    return with_jax(both, partial(trained, work)) if kind == "lstm" else both

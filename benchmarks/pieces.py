"""Time pieces of the package by themselves: traced updates, the CTC decoder, plans of layers."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import Maker, Step
from benchmarks.models import PlainEncoder, Weights
from benchmarks.work import Optimizer, by
from ipu_dynamo import Options, compile_training
from ipu_dynamo.ops.library.ctc_beam_search import ctc_beam_search
from ipu_dynamo.optimum import IPUConfig, plan_layers
from ipu_dynamo.optimum.placement import traced_layers

TIME, CLASSES, BEAMS = 100, 32, 100  # of the decoder
LAYERS, WIDTH, IPUS = 48, 64, 8  # of the plan


def updates(kind: Any, count: int, size: int, **theirs: bool) -> Mapping[str, Maker]:
    """Updates of tensors that are traced from Python, beside PyTorch's own.

    Each update sets its gradients to zero.

    Args:
        kind: a class of PyTorch's optimisers; `theirs` are settings of its own updates.
        count, size: tensors, and numbers of each.
    """
    return {
        "PyTorch": partial(_update, by(kind, lr=1e-3, **theirs), count, size),
        "ours": partial(_own, by(kind, lr=1e-3), count, size),
    }


def _update(kind: Optimizer, count: int, size: int) -> Step:
    model = Weights(count, size)
    for weight in model.weights:
        weight.grad = torch.randn(size)
    optimizer = kind(model)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return update


def _own(kind: Optimizer, count: int, size: int) -> Step:
    model = Weights(count, size)
    run = compile_training(model, kind(model), Options())
    for _ in range(3):
        run(torch.randn(size))
    steps, values = run.executable._looped, [group.values for group in run.groups]

    @torch.no_grad()
    def update() -> None:
        end = steps.variants.choose(values).end
        end.prepare(values)
        end.write()  # and set accumulators to zero

    return update


def decoding(spread: float) -> Mapping[str, Maker]:
    """The CTC decoder on 32 sequences, and on one, with the default width of a beam.

    Args:
        spread: of scores; above 3 they are those of a recogniser that is sure of most time steps,
            else those of noise.
    """

    def decoder(batch: int) -> Step:
        scores = torch.randn(TIME, batch, CLASSES) * spread
        scores[..., 0] += spread * (spread > 3) * 2
        log_probs, lengths = scores.log_softmax(2), torch.full((batch,), TIME)
        return lambda: ctc_beam_search(log_probs, lengths, 0, BEAMS, 1)

    return {f"batch {batch}": partial(decoder, batch) for batch in (32, 1)}


def layer_plans() -> dict[str, float]:
    """Seconds to plan a model's layers over IPUs, on the clock and of the processor.

    The times of operators are known: their measurement is not counted.
    """
    model, sample = PlainEncoder(LAYERS, WIDTH, 256), (torch.randint(256, (2, 16)),)
    config = IPUConfig(ipus_per_replica=IPUS)
    with patch.object(traced_layers, "measured_costs", _equal_costs):
        plan_layers(model, sample, IPUS, config)  # imports
        start, cpu = time.perf_counter(), time.process_time()
        plan = plan_layers(model, sample, IPUS, config)
        spent = {"clock": time.perf_counter() - start, "processor": time.process_time() - cpu}
    assert sum(plan.layers_per_ipu) == LAYERS
    return {f"{LAYERS} layers on {IPUS} IPUs, {name}": value for name, value in spent.items()}


def _equal_costs(capture, options, *, loss):  # type: ignore[no-untyped-def]
    """Every operator takes as long, backward twice."""
    both = (1e-5, 2e-5) if capture.training else (1e-5, 0.0)
    return (both,) * sum(map(traced_layers.computes, capture.graph.graph.nodes))

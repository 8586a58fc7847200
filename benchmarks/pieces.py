"""Time pieces of the package by themselves: traced updates, the CTC decoder, plans of layers.

Times of the processor are those of the best of several bursts, taken in turn.
"""

import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.models import PlainEncoder
from ipu_dynamo import Options, compile_training, identity_loss
from ipu_dynamo.ops.library.ctc_beam_search import ctc_beam_search
from ipu_dynamo.optimum import IPUConfig, plan_layers
from ipu_dynamo.optimum.placement import traced_layers

_SMALL, _LARGE, _LARGE_PARTS = 200, 30_000_000, 6  # tensors and numbers that are updated
_TIME, _CLASSES, _BEAMS, _BATCH = 100, 32, 100, 32  # of the decoder
_LAYERS, _WIDTH, _IPUS = 48, 64, 8  # of the plan


class _Weights(nn.Module):
    """Weights whose gradients are their inputs."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return identity_loss(torch.stack([(w * x).sum() for w in self.weights]), "sum")


def updates() -> dict[str, float]:
    """Milliseconds of updates that are traced from Python beside PyTorch's own, and ratios.

    There are many small tensors, and few large ones. Each update sets its gradients to zero.
    """
    torch.set_num_threads(1)
    small = _best_seconds(
        eager=_eager(torch.optim.Adamax, _SMALL, 64), ours=_ours(torch.optim.Adamax, _SMALL, 64)
    )
    size = _LARGE // _LARGE_PARTS
    large = _best_seconds(
        fused=_eager(torch.optim.Adagrad, _LARGE_PARTS, size, fused=True),
        ours=_ours(torch.optim.Adagrad, _LARGE_PARTS, size),
    )
    return {
        f"Adamax, {_SMALL} tensors of 64, eager, ms": 1e3 * small["eager"],
        f"Adamax, {_SMALL} tensors of 64, ours, ms": 1e3 * small["ours"],
        "ours in times of eager": small["ours"] / small["eager"],
        "Adagrad, 30 million numbers, fused, ms": 1e3 * large["fused"],
        "Adagrad, 30 million numbers, ours, ms": 1e3 * large["ours"],
        "ours in times of fused": large["ours"] / large["fused"],
    }


def _eager(kind: type, count: int, size: int, **settings: bool) -> Callable[[], None]:
    model = _Weights(count, size)
    for weight in model.weights:
        weight.grad = torch.randn(size)
    optimizer = kind(model.parameters(), lr=1e-3, **settings)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return update


def _ours(kind: type, count: int, size: int) -> Callable[[], None]:
    model = _Weights(count, size)
    run = compile_training(model, kind(model.parameters(), lr=1e-3), Options())
    for _ in range(3):
        run(torch.randn(size))
    steps, values = run.executable._looped, [group.values for group in run.groups]

    def update() -> None:
        end = steps.variants.choose(values).end
        end.prepare(values)
        end.write()  # and set accumulators to zero

    return update


def decoder() -> dict[str, float]:
    """Milliseconds of one sequence and of 32 in the CTC decoder, and their ratio, on one thread.

    The scores are those of a recogniser that is sure of most time steps, and of noise; the beam has
    the default width.
    """
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name, spread in (("sure", 6.0), ("noise", 3.0)):
        spent = _best_seconds(
            repetitions=5,
            burst=1,
            one=_decoding(_scores(1, spread)),
            all=_decoding(_scores(_BATCH, spread)),
        )
        figures |= {
            f"{name}: 1, ms": 1e3 * spent["one"],
            f"{name}: {_BATCH}, ms": 1e3 * spent["all"],
            f"{name}: {_BATCH} in times of 1": spent["all"] / spent["one"],
        }
    return figures


def _scores(batch: int, spread: float) -> Tensor:
    torch.manual_seed(0)
    scores = torch.randn(_TIME, batch, _CLASSES) * spread
    scores[..., 0] += spread * (spread > 3) * 2
    return scores.log_softmax(2)


def _decoding(log_probs: Tensor) -> Callable[[], object]:
    lengths = torch.full(log_probs.shape[1:2], _TIME)
    return lambda: ctc_beam_search(log_probs, lengths, 0, _BEAMS, 1)


def _best_seconds(
    repetitions: int = 15, burst: int = 10, **contenders: Callable[[], object]
) -> dict[str, float]:
    """The best time of each, in bursts; CPU time, which other processes do not add to."""
    best = dict.fromkeys(contenders, float("inf"))
    with torch.no_grad():
        for _ in range(repetitions):
            for name, run in contenders.items():
                start = time.process_time()
                for _ in range(burst):
                    run()
                best[name] = min(best[name], (time.process_time() - start) / burst)
    return best


def layer_plans() -> dict[str, float]:
    """Seconds to plan a model's layers over IPUs, on the clock and of the processor.

    The times of operators are known: their measurement is not counted.
    """
    model, sample = PlainEncoder(_LAYERS, _WIDTH, 256), (torch.randint(256, (2, 16)),)
    config = IPUConfig(ipus_per_replica=_IPUS)
    with patch.object(traced_layers, "measured_costs", _equal_costs):
        plan_layers(model, sample, _IPUS, config)  # imports
        start, cpu = time.perf_counter(), time.process_time()
        plan = plan_layers(model, sample, _IPUS, config)
        spent = {"clock": time.perf_counter() - start, "processor": time.process_time() - cpu}
    assert sum(plan.layers_per_ipu) == _LAYERS
    return {f"{_LAYERS} layers on {_IPUS} IPUs, {name}": value for name, value in spent.items()}


def _equal_costs(capture, options, *, loss):  # type: ignore[no-untyped-def]
    """Every operator takes as long, backward twice."""
    both = (1e-5, 2e-5) if capture.training else (1e-5, 0.0)
    return (both,) * sum(map(traced_layers.computes, capture.graph.graph.nodes))

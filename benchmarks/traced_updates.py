"""Measure updates that are traced from Python beside PyTorch's own: many small tensors, and few
large ones."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ipu_dynamo import Options, compile_training, identity_loss

_SMALL, _LARGE, _LARGE_PARTS, _REPETITIONS, _BURST = 200, 30_000_000, 6, 15, 10


class _Weights(nn.Module):
    """Weights whose gradients are their inputs."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return identity_loss(torch.stack([(w * x).sum() for w in self.weights]), "sum")


def seconds() -> dict[str, float]:
    """Milliseconds of an update alone, in turn, and ratios."""
    torch.set_num_threads(1)
    small = _alternating(
        eager=_eager(torch.optim.Adamax, _SMALL, 64),
        ours=_ours(torch.optim.Adamax, _SMALL, 64),
    )
    size = _LARGE // _LARGE_PARTS
    large = _alternating(
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
    step: Callable[[], None] = kind(model.parameters(), lr=1e-3, **settings).step
    return step


def _ours(kind: type, count: int, size: int) -> Callable[[], None]:
    model = _Weights(count, size)
    run = compile_training(model, kind(model.parameters(), lr=1e-3), Options())
    for _ in range(3):
        run(torch.randn(size))
    steps, values = run.executable._looped, [group.values for group in run.groups]

    def update() -> None:
        end = steps.variants.choose(values).end
        end.prepare(values)
        end.write()

    return update


def _alternating(**contenders: Callable[[], None]) -> dict[str, float]:
    """The best time of each, in bursts; CPU time, which other processes do not add to."""
    best = dict.fromkeys(contenders, float("inf"))
    with torch.no_grad():
        for _ in range(_REPETITIONS):
            for name, run in contenders.items():
                start = time.process_time()
                for _ in range(_BURST):
                    run()
                best[name] = min(best[name], (time.process_time() - start) / _BURST)
    return best

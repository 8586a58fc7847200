"""Time what torch.compile(backend="ipu") adds to a call of a tiny model, beside PyTorch's backends.

The arithmetic takes a few microseconds, so a call is mostly what surrounds it. For inference the
measure is `backend="eager"`, which runs what Dynamo captured as it is; for training through
`loss.backward()` it is `backend="aot_eager"`, which has autograd's wrappers as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Maker, Step
from ipu_dynamo.torch_compile.backend import ipu

ROWS, WIDTH = 4, 8
Activation = type[nn.Module] | None
OURS: dict[str, dict[str, Any]] = {
    "ipu, eager engine": {"backend": ipu, "options": {"engine": "eager"}},
    "ipu": {"backend": ipu},
}


def inference(layers: int, between: Activation = None) -> dict[str, Maker]:
    """A call without gradients."""
    settings = {"backend eager": {"backend": "eager"}, **OURS}
    return {name: partial(_inferring, layers, between, given) for name, given in settings.items()}


def training(layers: int, between: Activation = None) -> dict[str, Maker]:
    """Forward and backward; the gradients are kept, as between two steps of an optimiser."""
    settings = {"backend aot_eager": {"backend": "aot_eager"}, **OURS}
    return {name: partial(_training, layers, between, given) for name, given in settings.items()}


MODELS: dict[str, tuple[str, int, Activation]] = {
    "1_layer": ("1 tiny layer", 1, None),
    "8_layers": ("8 tiny layers", 8, None),
    "mlp": ("a tiny perceptron of 3 layers", 3, nn.ReLU),
}
CASES: dict[str, tuple[str, Callable[[], dict[str, Maker]]]] = {
    f"door_{kind.__name__}_{name}": (
        f"{kind.__name__} through torch.compile, {what}",
        partial(kind, layers, between),
    )
    for kind in (inference, training)
    for name, (what, layers, between) in MODELS.items()
}


def _inferring(layers: int, between: Activation, settings: dict[str, Any]) -> Step:
    call, x = _compiled(_model(layers, between), settings), torch.randn(ROWS, WIDTH)

    def step() -> None:
        with torch.no_grad():
            call(x)

    return step


def _training(layers: int, between: Activation, settings: dict[str, Any]) -> Step:
    call, x = _compiled(_model(layers, between), settings), torch.randn(ROWS, WIDTH)

    def step() -> None:
        call(x).sum().backward()

    return step


def _compiled(model: nn.Module, settings: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, fullgraph=True, isolate_recompiles=True, **settings)


def _model(layers: int, between: Activation) -> nn.Module:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(WIDTH, WIDTH), *([between()] if between else [])]
    return nn.Sequential(*modules)

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
from benchmarks.work import without_gradient
from ipu_dynamo.torch_compile.backend import ipu

ROWS, WIDTH = 4, 8
Activation = type[nn.Module] | None
OURS: dict[str, dict[str, Any]] = {
    "ipu, eager engine": {"backend": ipu, "options": {"engine": "eager"}},
    "ipu": {"backend": ipu},
}


PLAIN = {"inference": "eager", "training": "aot_eager"}  # PyTorch's backends


def contenders(kind: str, layers: int, between: Activation) -> dict[str, Maker]:
    """A call without gradients; or forward and backward, whose gradients are kept, as between two
    steps of an optimiser."""
    plain = PLAIN[kind]
    settings = {f"backend {plain}": {"backend": plain}, **OURS}
    return {name: partial(_step, kind, layers, between, given) for name, given in settings.items()}


def _step(kind: str, layers: int, between: Activation, settings: dict[str, Any]) -> Step:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(WIDTH, WIDTH), *([between()] if between else [])]
    model = nn.Sequential(*modules)
    call = torch.compile(model, fullgraph=True, isolate_recompiles=True, **settings)
    x = torch.randn(ROWS, WIDTH)
    if kind == "inference":
        return without_gradient(call, x)
    return lambda: call(x).sum().backward()


MODELS: dict[str, tuple[str, int, Activation]] = {
    "1_layer": ("1 tiny layer", 1, None),
    "8_layers": ("8 tiny layers", 8, None),
    "mlp": ("a tiny perceptron of 3 layers", 3, nn.ReLU),
}
CASES: dict[str, tuple[str, Callable[[], dict[str, Maker]]]] = {
    f"door_{kind}_{name}": (
        f"{kind} through torch.compile, {what}",
        partial(contenders, kind, layers, between),
    )
    for kind in PLAIN
    for name, (what, layers, between) in MODELS.items()
}

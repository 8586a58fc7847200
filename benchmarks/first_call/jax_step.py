"""Make the first step of a training in JAX: the same weights and work, compiled as a whole by XLA.

Apart from the other steps, as it takes the peer of this checkout; JAX is an extra.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.jax_peer import models as jax_models
from benchmarks.jax_peer.peer import Training as Work
from benchmarks.jax_peer.peer import trained

from .models import Classifier, Digits, Encoder, LanguageModel, Step, Training


def jax_step(training: Training) -> Step:
    """A call of one step; what XLA compiles is the whole of it, with the optimiser."""
    rows = len(training.inputs[0]) // training.accumulation
    work = Work(
        training.model,
        training.optimizer,
        _loss(training.model),
        training.inputs,
        rows,
        training.accumulation,
    )
    run = trained(work).step
    return lambda: torch.tensor(float(run()[-1, -1]))


def _loss(model: torch.nn.Module) -> Callable[..., Any]:
    """The loss of a model of this benchmark in JAX."""
    match model:
        case Digits():
            return jax_models.digits
        case Classifier():
            return partial(jax_models.classifier, layers=len(model.layers))
        case LanguageModel():
            layers = list(model.layers)
            return partial(jax_models.language_model, layers=len(layers), heads=layers[0].heads)
        case Encoder():
            layers = list(model.layers)
            return partial(jax_models.stack, layers=len(layers), heads=layers[0].heads)
    raise ValueError(f"{type(model).__name__} is not written in JAX")

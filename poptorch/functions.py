"""Make executors: `trainingModel`, `inferenceModel`."""

from collections.abc import Callable
from typing import Any

import torch

from poptorch._distribution import __version__
from poptorch.executor import PoplarExecutor
from poptorch.executor_module import plain_module
from poptorch.optim import SGD
from poptorch.options import Options, adopt
from poptorch.wrapping import plain_copy

_DEFAULT_RATE = 0.01


def trainingModel(
    model: Callable[..., Any] | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a model so that each call runs forward, backward and update on IPUs.

    Args:
        model: its forward returns, or computes, the loss: a torch loss or
            `poptorch.identity_loss`. An executor stands for its model.
        options: frozen from now on.
        optimizer: of `poptorch.optim` or `torch.optim`; None: SGD with a learning rate of 0.01.

    Raises:
        RuntimeError: the model is wrapped for training already.
    """
    module = _model_of(model)
    adopted = adopt(options, training=True, optimizer=optimizer)
    if optimizer is None:
        optimizer = SGD(module.parameters(), lr=_DEFAULT_RATE)
    return PoplarExecutor(
        model=plain_copy(module),
        options=adopted,
        training=True,
        poptorch_version=__version__,
        optimizer=optimizer,
        user_model=module,
    )


def inferenceModel(
    model: Callable[..., Any] | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap a model so that each call runs its forward pass on IPUs.

    Args:
        model: a module or a function on tensors. An executor stands for its model, and the new
            one follows its training.
        options: frozen from now on.
    """
    module = _model_of(model)
    return PoplarExecutor(
        model=plain_copy(module),
        options=adopt(options, training=False),
        training=False,
        poptorch_version=__version__,
        user_model=module,
    )


def _model_of(model: Any) -> Any:
    module = model._made_from if isinstance(model, PoplarExecutor) else plain_module(model)
    if not callable(module):
        raise TypeError(f"a model is a torch.nn.Module or a callable, got {type(module).__name__}")
    return module

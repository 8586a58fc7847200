"""Make executors: `trainingModel`, `inferenceModel`, and from files `load`."""

from collections.abc import Callable
from typing import Any

import torch

from ipu_dynamo.saved.refusal import SavedProgramError
from poptorch._distribution import __version__
from poptorch.enums import ConnectionType
from poptorch.errors import createPoptorchError
from poptorch.executor.executor import PoplarExecutor
from poptorch.executor.executor_module import plain_module
from poptorch.optim import SGD
from poptorch.options import Options
from poptorch.saving.executor_part import read_whole
from poptorch.saving.files import metadata
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
    if optimizer is None:
        optimizer = SGD(module.parameters(), lr=_DEFAULT_RATE)
    return PoplarExecutor(
        model=plain_copy(module),
        options=options,
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
        options=options,
        training=False,
        poptorch_version=__version__,
        user_model=module,
    )


def load(filename: str, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """Bring up an executor that `PoplarExecutor.save` wrote with its model.

    Weights, the optimizer's state and random numbers are those of the file. A file that another
    user wrote has to be trusted, because its model is pickled.

    Args:
        filename: of the file.
        edit_opts_fn: is called with the options, to change some that act at run time.

    Raises:
        AssertionError: this version cannot read the file, or the file has no model in it.
        poptorch.Error: it was written by another user. Nothing of it was run.
    """
    exported, call, opened = read_whole(filename, edit_opts_fn)
    options = exported.options
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    options.deleteIfExists("ipu_version")
    if exported.training:
        executor = trainingModel(exported.model, options, exported.optimizer)
    else:
        executor = inferenceModel(exported.model, options)
    executor._weights.lock.run(lambda: executor._install(call, opened, whole=True))
    return executor


def importPoptorchMetadataFromFile(filename: str) -> bytes:
    """Return the description in a saved program, as JSON: versions, parts, sizes.

    Args:
        filename: of the file.
    """
    try:
        return metadata(filename)
    except SavedProgramError as error:
        raise createPoptorchError(
            f"Invalid file {filename}: {error}", id="saved-program"
        ) from error


def _model_of(model: Any) -> Any:
    module = model._made_from if isinstance(model, PoplarExecutor) else plain_module(model)
    if not callable(module):
        raise TypeError(f"a model is a torch.nn.Module or a callable, got {type(module).__name__}")
    return module

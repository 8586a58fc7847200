"""Keep what a model returned from being differentiated by hand."""

from typing import Any, NoReturn

from torch import Tensor

from poptorch.errors import createPoptorchError


def refuse_backward(output: Tensor) -> None:
    """Let `output.backward()` say why it cannot work."""
    output.backward = _no_backward  # type: ignore[method-assign]


def _no_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise createPoptorchError(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
        "trainingModel, the backwards pass is performed automatically when invoking the model. If "
        "you're using an inferenceModel, you should use a trainingModel instead."
    )

"""Keep what a model returned from being differentiated by hand."""

from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from poptorch.errors import createPoptorchError

_OURS = ("backward", "__getstate__")


def refuse_backward(output: Tensor) -> None:
    """Let `output.backward()` say why it cannot work.

    Saved or copied by pickle, the tensor is as if it had come from elsewhere.
    """
    attributes: dict[str, Any] = output.__dict__
    attributes["backward"] = _no_backward
    attributes["__getstate__"] = partial(_others, attributes)


def _others(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a tensor that are not from here."""
    return {name: value for name, value in attributes.items() if name not in _OURS}


def _no_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise createPoptorchError(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
        "trainingModel, the backwards pass is performed automatically when invoking the model. If "
        "you're using an inferenceModel, you should use a trainingModel instead.",
        id="call",
    )

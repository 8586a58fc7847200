"""Say what `backward()` of a step's results has to do: nothing."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from ipu_dynamo.errors import IpuError

_OURS = ("backward", "__getstate__")


def refuse_backward(values: Iterable[Any], refuse: Callable[..., NoReturn]) -> None:
    """Let `backward` of tensors that a call returns be `refuse`, which raises.

    Saved or copied by pickle, a tensor is as if it had come from elsewhere.
    """
    for value in values:
        if isinstance(value, Tensor):
            attributes: dict[str, Any] = value.__dict__
            attributes["backward"] = refuse
            attributes["__getstate__"] = partial(_attributes_of_others, attributes)


def _attributes_of_others(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a tensor that are not from here."""
    return {name: value for name, value in attributes.items() if name not in _OURS}


def trained_already(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse `backward()` on what a training step has returned.

    Raises:
        IpuError: always.
    """
    raise IpuError(
        "backward() cannot be called on what a training step returns: the call has done the "
        "backward pass and the update\n"
        "  try:  leave out backward(), zero_grad(), optimizer.step() and clip_grad_norm_; "
        "compile_training takes the optimizer, and clip"
    )

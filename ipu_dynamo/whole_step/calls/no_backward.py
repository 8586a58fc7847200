"""Refuse `backward()` on the results of a step.

The code that returns a tensor sets two attributes of it. This is inline, as each call pays for it:

    attributes["backward"] = trained_already
    attributes["__getstate__"] = partial(attributes_of_others, attributes)

A tensor that is saved or copied by pickle has neither.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from ipu_dynamo.errors import IpuError

_OURS = ("backward", "__getstate__")


def attributes_of_others(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a tensor without those two."""
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

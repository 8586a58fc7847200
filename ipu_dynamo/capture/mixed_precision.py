"""Apply weights of one precision to inputs of another, as PopTorch does.

A layer computes in the precision of its input: weights are converted where they are read, and stay
as they are. Running statistics keep their own.

Source: PopTorch user guide, "Half/float precision support"; plain PyTorch refuses such layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_FLOATS = (torch.float16, torch.float32)
_CONVOLUTIONS = (
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {  # the first ones of each, in order
    **dict.fromkeys((F.linear, *_CONVOLUTIONS), ("input", "weight", "bias")),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias"),
    F.group_norm: ("input", "num_groups", "weight", "bias"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias"),
}


class MixedPrecision(TorchFunctionMode):
    """While entered, layers convert their weights to the precision of their input."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        names = _ARGUMENTS.get(func)
        if names is None:
            return func(*args, **(kwargs or {}))
        named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        x = named["input"]
        mixed = [name for name in ("weight", "bias") if _mixed(x, named.get(name))]
        named |= {name: named[name].to(x.dtype) for name in mixed}
        upcast = mixed and x.dtype == torch.float16 and "running_mean" in names
        if upcast:  # no operator takes half weights beside running statistics in float
            named |= {name: named[name].float() for name in ("input", *mixed)}
        positional = [named.pop(name) for name in names[: len(args)]]
        result = func(*positional, *args[len(names) :], **named)
        return result.to(x.dtype) if upcast else result


def _mixed(x: Any, weight: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and x.dtype in _FLOATS
        and weight.dtype in _FLOATS
        and x.dtype != weight.dtype
    )

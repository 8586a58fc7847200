"""Apply weights of one precision to inputs of another, as PopTorch does.

A layer returns its result in the precision of its input. It casts weights when it reads them; the
stored weights and running statistics keep their own precision.

Source: PopTorch user guide, "Half/float precision support"; plain PyTorch refuses such layers.
"""

import inspect
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
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats"),
}
_ATTENTION = inspect.signature(F.multi_head_attention_forward)  # no mode sees its parts
_WEIGHTS_OF_ATTENTION = (
    *("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_weight", "out_proj_bias"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
)
_STATISTICS = ("running_mean", "running_var")
_UPDATE = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}


class MixedPrecision(TorchFunctionMode):
    """While entered, layers convert their weights to the precision of their input."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.multi_head_attention_forward:
            call = _ATTENTION.bind(*args, **(kwargs or {}))
            x, given = call.arguments["query"], call.arguments
            mixed = [name for name in _WEIGHTS_OF_ATTENTION if _mixed(x, given.get(name))]
            given |= {name: given[name].to(x.dtype) for name in mixed}
            return func(*call.args, **call.kwargs)
        names = _ARGUMENTS.get(func)
        if names is None:
            return func(*args, **(kwargs or {}))
        named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        x = named["input"]
        mixed = [name for name in ("weight", "bias") if _mixed(x, named.get(name))]
        named |= {name: named[name].to(x.dtype) for name in mixed}
        changed = _compute_in_one_precision(func, named, bool(mixed))
        positional = [named.pop(name) for name in names[: len(args)]]
        result = func(*positional, *args[len(names) :], **named)
        for statistic, copy in changed:
            statistic.copy_(copy)
        return result.to(x.dtype) if func in _UPDATE else result


def _compute_in_one_precision(
    func: Callable[..., Any], named: dict[str, Any], mixed: bool
) -> list[tuple[Tensor, Tensor]]:
    """Let a normalisation compute in float32 where its statistics differ from its input.

    Args:
        named: the arguments, which are replaced.
        mixed: whether weights have been converted.

    Returns:
        half statistics that the call changes, with the copies that it changes instead.
    """
    if func not in _UPDATE:
        return []
    statistics = [t for name in _STATISTICS if isinstance(t := named.get(name), Tensor)]
    x = named["input"]
    if not (any(_mixed(x, t) for t in statistics) if statistics else mixed):
        return []
    before = dict(named)
    for name in ("input", "weight", "bias", *_STATISTICS):
        if isinstance(tensor := named.get(name), Tensor):
            named[name] = tensor.float()
    option, default = _UPDATE[func]
    if not named.get(option, default):
        return []
    pairs = [(before[name], named[name]) for name in _STATISTICS if statistics]
    return [(statistic, copy) for statistic, copy in pairs if copy is not statistic]


def _mixed(x: Any, weight: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and x.dtype in _FLOATS
        and weight.dtype in _FLOATS
        and x.dtype != weight.dtype
    )

"""Let a traced model learn a value that it fills in at indices.

The gradient of `index_fill` sums over the indices that differ, and values decide how many do. That
of `masked_fill`, under the mask of the same places, has a static shape.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_INSTEAD = {
    torch.index_fill: torch.masked_fill,
    Tensor.index_fill: Tensor.masked_fill,
    Tensor.index_fill_: Tensor.masked_fill_,
}
_NAMES = ("input", "dim", "index", "value")


class FilledIndices(TorchFunctionMode):
    """While entered, tensors are filled in at indices by a mask."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _INSTEAD:
            return func(*args, **(kwargs or {}))
        named = {**dict(zip(_NAMES, args, strict=False)), **(kwargs or {})}
        x, dim, index, value = (named.get(name) for name in _NAMES)
        if not isinstance(x, Tensor) or not isinstance(value, Tensor) or not isinstance(dim, int):
            return func(*args, **(kwargs or {}))
        return _INSTEAD[func](x, _mask(x, dim, index), value)  # type: ignore[operator]


def _mask(x: Tensor, dim: int, index: Any) -> Tensor:
    """Where `index` points along `dim`; it can be broadcast to `x`."""
    shape = [1] * x.dim()
    size = x.shape[dim] if shape else 1
    mask = torch.zeros(size, dtype=torch.bool, device=x.device).index_fill(0, index, True)
    if shape:
        shape[dim] = size
    return mask.view(shape)

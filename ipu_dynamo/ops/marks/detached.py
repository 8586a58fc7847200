"""Keep a `detach` that a function under `torch.vmap` writes recognisable.

The batching rule of `aten.detach` calls `aten.detach` on PyTorch 2.13, and from 2.14 on
`aten.alias`, through which gradients flow. Until it is recorded, `ipu::detached` is in its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("detached(Tensor x) -> Tensor")


def _detached(x: Tensor) -> Tensor:
    return x.clone()


def _of_all_rows(
    info: object, dims: tuple[int | None, ...], x: Tensor
) -> tuple[Tensor, int | None]:
    return detached_op(x), dims[0]


_library.impl("detached", _detached, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::detached", _detached, lib=_library)
torch.library.register_vmap("ipu::detached", _of_all_rows, lib=_library)
detached_op = torch.ops.ipu.detached.default


class DetachesMarked(TorchFunctionMode):
    """Call `ipu::detached` where a function calls `detach`."""

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (torch.Tensor.detach, torch.detach):
            return detached_op(*arguments, **(keywords or {}))
        return function(*arguments, **(keywords or {}))

"""Stand for torch_scatter, whose kernels are built for each PyTorch: its functions by PyTorch's."""

import sys
import types

import torch
from torch import Tensor

_REDUCTIONS = {"sum": "sum", "add": "sum", "mean": "mean", "mul": "prod", "min": "amin"}
_REDUCTIONS["max"] = "amax"


def scatter(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Reduce the slices of `src` that have the same index; where there are none stands zero."""
    if index.dim() == 1:
        shape = [1] * src.dim()
        shape[dim] = -1
        index = index.view(shape)
    index = index.expand_as(src)
    if out is None:
        size = list(src.shape)
        size[dim] = int(index.max()) + 1 if dim_size is None else dim_size
        out = src.new_zeros(size)
    return torch.scatter_reduce(out, dim, index, src, _REDUCTIONS[reduce], include_self=False)


def scatter_sum(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """Add the slices of `src` that have the same index."""
    return scatter(src, index, dim, out, dim_size)


def install() -> None:
    """Let `import torch_scatter` find these."""
    module = types.ModuleType("torch_scatter")
    vars(module).update(scatter=scatter, scatter_sum=scatter_sum)
    sys.modules[module.__name__] = module

"""Run what Inductor's code allocates and frees, without its kernels. Checked on PyTorch 2.13.0."""

from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.runtime.engines.stage import Stage

_KERNELS = "cpp_"  # as the names of kernels of C++ begin in generated code


def allocating(run: Stage) -> Stage | None:
    """The same code for tensors without contents; None: it is no code of the kind that we know.

    It still calls operators of PyTorch, such as products.
    """
    code = getattr(run, "__func__", None)
    if not isinstance(code, FunctionType):
        return None
    scope = code.__globals__
    instead: dict[str, Any] = {name: _nothing for name in scope if name.startswith(_KERNELS)}
    instead |= {
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "empty_strided_cpu": _empty,
        "empty_strided_cpu_pinned": _empty,
        "reinterpret_tensor": _view,
    }
    copy = FunctionType(
        code.__code__, scope | instead, code.__name__, code.__defaults__, code.__closure__
    )
    return MethodType(copy, run.__self__)  # type: ignore[attr-defined]


def _nothing(*_: Any) -> None:
    """Stand in for a kernel or a check."""


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _view(of: Tensor, size: Sequence[int], stride: Sequence[int], further: int) -> Tensor:
    return of.as_strided(size, stride, of.storage_offset() + further)

"""Turn tensors that Python has kept from a trace into their values, or into tensors that raise."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ipu_dynamo.capture.private.tracing import fake_mode_of, outside_modes, pytree
from ipu_dynamo.errors import CompileError


class _Left(FakeTensor):
    """A tensor of a trace that Python has kept. It stands for its value, if that is a constant."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(_Left, real_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        real = vars(self)["ipu_real"]
        return (
            repr(real) if real is not None else f"<a tensor of a trace: {vars(self)['ipu_from']}>"
        )


def look_of(fake: Tensor) -> Tensor:
    """Another fake tensor with the type and layout of one."""
    with outside_modes(), fake_mode_of([fake]):
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
        ).requires_grad_(fake.requires_grad)


def leave(tensor: Tensor, real: Tensor | None, where: str) -> None:
    """Turn a tensor that Python has kept from a trace into its value, or a tensor that raises."""
    if real is not None and tensor.requires_grad:
        real.requires_grad_()
    tensor.__class__ = _Left
    vars(tensor).update(ipu_real=real, ipu_from=where)


def is_left(value: Any) -> bool:
    return isinstance(value, _Left)


def has_value(tensor: Tensor) -> bool:
    """Whether a tensor that Python has kept from a trace is a constant."""
    return vars(tensor)["ipu_real"] is not None


def origin_of(tensor: Tensor) -> str:
    """The line that made a tensor that Python has kept from a trace."""
    return str(vars(tensor)["ipu_from"])


def real_of(tensor: Tensor) -> Tensor:
    """The value of a tensor that Python has kept from a trace.

    Raises:
        CompileError: it depends on inputs, weights or random numbers of the trace.
    """
    real: Tensor | None = vars(tensor)["ipu_real"]
    if real is None:
        raise CompileError(
            "Python has kept this tensor from when the model was traced, and it has no value: only "
            "what forward returns has one",
            where=origin_of(tensor),
            hint="return it from forward, or keep it in a buffer (copy_)",
            id="value",
        )
    return real

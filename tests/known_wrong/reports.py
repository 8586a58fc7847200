"""Say how a program after a public report is written, run and judged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_CLOSE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float16: 0.01, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True)
class Program:
    """A program after a report.

    Args:
        report: the number of the report in PyTorch's tracker.
        run: the program; its argument compiles a function.
        close: how far floating results may lie from plain PyTorch, relative to the largest; 0: the
            same bits.
    """

    report: int
    run: Callable[[Compile], Any]
    close: float | None

    @property
    def name(self) -> str:
        return self.run.__name__

    def difference(self, compile_with: Compile) -> str:
        """How the compiled program differs from plain PyTorch; nothing if it does not.

        Where plain PyTorch raises, the compiled program has to.
        """
        try:
            right = self.run(lambda function: function)
        except Exception as error:
            right = error
        torch.manual_seed(0)
        try:
            made = self.run(compile_with)
        except Exception:
            if isinstance(right, Exception):
                return ""
            raise
        if isinstance(right, Exception):
            return f"it gives {made}, where plain PyTorch raises {type(right).__name__}"
        return _difference(pytree.tree_leaves(made), pytree.tree_leaves(right), self.close)


PROGRAMS: dict[str, Program] = {}


def program(report: int, close: float | None = None) -> Callable[..., Any]:
    """Add a function that is given the compiler."""

    def add(run: Callable[[Compile], Any]) -> Callable[[Compile], Any]:
        assert run.__name__ not in PROGRAMS, run.__name__
        PROGRAMS[run.__name__] = Program(report, run, close)
        return run

    return add


def compiled(
    report: int, *inputs: Any, gradients: bool = False, close: float | None = None
) -> Callable[..., Any]:
    """Add a function that is compiled, and called with copies of the inputs.

    Its results are compared, the inputs after the call, and the gradients of floating inputs.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(compile_with: Compile) -> Any:
            given = [_copy(value, gradients) for value in inputs]
            results = compile_with(function)(*given)
            if not gradients:
                return results, given
            tensors = [t for t in pytree.tree_leaves(results) if t.requires_grad]
            sum((t * _weights(t)).sum() for t in tensors).backward()
            return results, [getattr(value, "grad", None) for value in given]

        run.__name__ = function.__name__
        program(report, close)(run)
        return function

    return add


def _copy(value: Any, gradients: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.clone()
    return copied.requires_grad_() if gradients and value.is_floating_point() else copied


def _weights(result: Tensor) -> Tensor:
    """Other weights for each element, so that a gradient in the wrong place shows."""
    return torch.linspace(0.5, 1.5, max(result.numel(), 1)).to(result.dtype).view(result.shape)


def _difference(made: list[Any], right: list[Any], close: float | None) -> str:
    if len(made) != len(right):
        return f"{len(made)} results, right are {len(right)}"
    for one, other in zip(made, right, strict=True):
        if not isinstance(other, Tensor):
            if one != other:
                return f"{one}, right is {other}"
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{one.dtype}{list(one.shape)}, right is {other.dtype}{list(other.shape)}"
        if not _near(one.detach(), other.detach(), close):
            return f"{_few(one)}, right is {_few(other)}"
    return ""


def _near(made: Tensor, right: Tensor, close: float | None) -> bool:
    if not (right.is_floating_point() or right.is_complex()) or close == 0:
        return torch.equal(made, right) if right.dtype != torch.float else _same_bits(made, right)
    if right.is_complex():
        made, right = torch.view_as_real(made), torch.view_as_real(right)
    finite = right.isfinite()
    if not torch.equal(made.isfinite(), finite) or not torch.equal(made.isnan(), right.isnan()):
        return False
    rest = ~finite & ~right.isnan()
    if not torch.equal(made[rest], right[rest]):
        return False
    size = right[finite].abs().max() if finite.any() else torch.zeros(())
    limit = _CLOSE.get(right.dtype, 1e-5) if close is None else close
    return bool(((made - right)[finite].abs() <= limit * size).all())


def _same_bits(made: Tensor, right: Tensor) -> bool:
    return torch.equal(made.view(torch.int32), right.view(torch.int32))


def _few(tensor: Tensor) -> str:
    return str(tensor.detach().flatten()[:6].tolist())

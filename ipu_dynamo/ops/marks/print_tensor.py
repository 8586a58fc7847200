"""Let models print tensors while their programs run.

`ipu::print_tensor` prints and returns a copy. Whole steps have none left: `PrintTensors` makes a
stream to the host of each, so that lines come in one order for any number of workers.
"""

import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.ops.tensor_text import FloatFormat, TensorFormat, tensor_text

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "print_tensor(Tensor x, str title, bool print_gradient, int summarise_threshold, "
    "int edge_items, int max_line_width, int digits, str float_format, str separator, "
    "str open_bracket, str close_bracket) -> Tensor"
)


@dataclass(frozen=True, slots=True)
class Printing:
    """That a tensor is printed: under which title, and how."""

    title: str
    form: TensorFormat

    @classmethod
    def of(cls, node: fx.Node) -> "Printing":
        """Read the title and the format from a node of the operator."""
        _, title, _, *form = node.args
        return cls(cast(str, title), TensorFormat(*cast(list[Any], form)))

    def __call__(self, tensor: Tensor) -> None:
        """Print a tensor to standard error."""
        if sys.stderr is not None:  # there may be none, as under pythonw
            sys.stderr.write(f"{self.title}: {tensor_text(tensor, self.form)}\n")
            sys.stderr.flush()


def print_tensor(
    x: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: FloatFormat = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """Print `x` to standard error, in every micro-batch of every replica.

    Whole steps print micro-batch by micro-batch, and replica by replica within each, also if
    workers run them in parallel. It has no effect if nothing reads the returned tensor, and outside
    of programs and `torch.compile`.

    Args:
        x: the tensor that is printed.
        title: text before the tensor; empty: its name.
        print_gradient: print the gradient as well, with the title `<title>_gradient`.
        summarise_threshold: of tensors with more elements only the edges are printed; 0: never.
        edge_items: how many elements, or rows, from both ends of each dimension are an edge.
        max_line_width: characters after which a row is broken; 0: never.
        digits: significant digits of the largest number; all others have as many decimals.
        float_format: `fixed` point; `scientific` notation; `auto` is fixed point where that is
            short and shows a digit of every number, else scientific; `none` prints each number for
            itself, in six digits at most.
        separator: between the elements of a row.
        open_bracket: at the beginning of rows.
        close_bracket: at the end of rows.

    Returns:
        The values of `x`.

    Raises:
        ValueError: for a value that an argument cannot have.

    Source: PopTorch user guide, "poptorch.ipu_print_tensor".
    """
    form = (
        summarise_threshold, edge_items, max_line_width, digits, float_format, separator,
        open_bracket, close_bracket,
    )  # fmt: skip
    TensorFormat(*form)  # checks them
    if not torch.compiler.is_compiling():
        return x
    printed: Tensor = print_tensor_op(x, title, bool(print_gradient), *form)
    return printed


def _print(x: Tensor, title: str, print_gradient: bool, *form: Any) -> Tensor:
    Printing(title, TensorFormat(*form))(x)
    return x.clone()


def _copied(x: Tensor, title: str, print_gradient: bool, *form: Any) -> Tensor:
    return x.clone()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[1:]


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    title, print_gradient, *form = ctx.settings
    if print_gradient:
        gradient = print_tensor_op(gradient, f"{title}_gradient", False, *form)
    return gradient, *(None for _ in ctx.settings)


_library.impl("print_tensor", _print, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::print_tensor", _copied, lib=_library)
torch.library.register_autograd(
    "ipu::print_tensor", _gradient, setup_context=_remember, lib=_library
)
print_tensor_op: OpOverload = torch.ops.ipu.print_tensor.default

"""Print tensors of models while their programs run."""

from typing import Any, cast

from torch import Tensor

from ipu_dynamo.ops.marks.print_tensor import print_tensor
from ipu_dynamo.ops.tensor_text import FLOAT_FORMATS, FloatFormat
from poptorch.errors import createPoptorchError


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """Print a tensor to standard error in every micro-batch, and its gradient when training.

    The model has to read the result. On the CPU nothing is printed.

    Args:
        tensor: is printed on every replica.
        title: the text before it; empty: the tensor's name.
        print_gradient: print its gradient under `title` and `_gradient`.
        summarise_threshold: of tensors with more elements only the edges are printed; 0: never.
        edge_items: how many elements, or rows, from both ends of each dimension are an edge.
        max_line_width: characters after which a row is broken; 0: never.
        digits: significant digits of the largest number; all others have as many decimals.
        float_format: auto, fixed, scientific, or none.
        separator: between the elements of a row.
        open_bracket: at the beginning of rows.
        close_bracket: at the end of rows.

    Raises:
        poptorch.Error: `tensor` is no tensor, or another argument cannot be.
        KeyError: `float_format` is not one of these.
    """
    if not isinstance(cast(Any, tensor), Tensor):
        raise createPoptorchError(
            f"ipu_print_tensor takes a torch.tensor, got {tensor!r}", id="operator"
        )
    if float_format not in FLOAT_FORMATS:
        raise KeyError(f"{float_format}: choose one of {', '.join(FLOAT_FORMATS)}")
    try:
        return print_tensor(
            tensor,
            title,
            print_gradient,
            summarise_threshold,
            edge_items,
            max_line_width,
            digits,
            cast(FloatFormat, float_format),
            separator,
            open_bracket,
            close_bracket,
        )
    except ValueError as error:
        raise createPoptorchError(f"ipu_print_tensor: {error}", id="operator") from error


__all__ = ["ipu_print_tensor"]

"""Write a tensor as text: rows indented by depth, long ones broken, large tensors by their edges.

Source: PopTorch user guide, "poptorch.ipu_print_tensor".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Literal, get_args

import torch
from torch import Tensor

FloatFormat = Literal["auto", "fixed", "scientific", "none"]
FLOAT_FORMATS: tuple[str, ...] = get_args(FloatFormat)
_REST = "..."
_LEAST = -3  # digits before the point, of numbers that `auto` shows in fixed point: 0.0001


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """How tensors are written.

    Args:
        summarise_threshold: of tensors with more elements only the edges are written; 0: never.
        edge_items: how many elements, or rows, from both ends of each dimension are an edge.
        max_line_width: characters after which a row is broken after a separator; 0: never.
        digits: significant digits of the largest number; all others have as many decimals.
        float_format: `fixed` point; `scientific` notation; `auto` is fixed point where that is
            short and shows a digit of every number, else scientific; `none` writes each number for
            itself, in six digits at most.
        separator: between the elements of a row.
        open_bracket, close_bracket: around rows.

    Raises:
        ValueError: for a value that a field cannot have.
    """

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: FloatFormat = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"

    def __post_init__(self) -> None:
        if self.float_format not in FLOAT_FORMATS:
            raise ValueError(
                f"float_format is {self.float_format!r}; choose one of {', '.join(FLOAT_FORMATS)}"
            )
        least = {"summarise_threshold": 0, "edge_items": 1, "max_line_width": 0, "digits": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ValueError(f"{name} is {value!r}; it is a number from {smallest} on")
        for name in ("separator", "open_bracket", "close_bracket"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is a text")


def tensor_text(tensor: Tensor, form: TensorFormat) -> str:
    """A tensor as text, without a line break at its end."""
    summarised = 0 < form.summarise_threshold < tensor.numel()
    edges = form.edge_items if summarised else 0
    shown = _edges(tensor.detach(), edges)
    write = _number_writer(shown, form)
    width = max((len(write(number)) for number in shown.flatten().tolist()), default=0)

    def element(number: object) -> str:
        return write(number).rjust(width)

    if tensor.dim() == 0:
        return element(shown.item())
    return "\n".join(_rows(shown.tolist(), tensor.shape, edges, element, form, depth=0))


def _edges(tensor: Tensor, edges: int) -> Tensor:
    """`edges` elements from both ends of each dimension that has more; 0: all."""
    for dim, size in enumerate(tensor.shape):
        if edges and size > 2 * edges:
            ends = tensor.narrow(dim, 0, edges), tensor.narrow(dim, size - edges, edges)
            tensor = torch.cat(ends, dim)
    return tensor


def _rows(
    values: Sequence[object],
    sizes: Sequence[int],
    edges: int,
    element: Callable[[object], str],
    form: TensorFormat,
    *,
    depth: int,
) -> Iterator[str]:
    """The lines of a tensor, or of a slice of one."""
    indent, cut = " " * depth, len(values) < sizes[0]
    if len(sizes) == 1:
        texts = [element(value) for value in values]
        yield from _row([*texts[:edges], _REST, *texts[edges:]] if cut else texts, indent, form)
        return
    yield indent + form.open_bracket
    for place, value in enumerate(values):
        if cut and place == edges:
            yield f"{indent} {_REST}"
        assert isinstance(value, list)
        yield from _rows(value, sizes[1:], edges, element, form, depth=depth + 1)
    yield indent + form.close_bracket


def _row(texts: Sequence[str], indent: str, form: TensorFormat) -> Iterator[str]:
    """The lines of a row; each but the first stands one further in than the first element."""
    line, further = indent + form.open_bracket, f"{indent}  "
    empty = True
    for place, text in enumerate(texts):
        piece = text + (form.separator if place < len(texts) - 1 else form.close_bracket)
        too_long = 0 < form.max_line_width < len(line) + len(piece.rstrip())
        if too_long and not empty:
            yield line.rstrip()
            line = further
        line, empty = line + piece, False
    yield line if texts else line + form.close_bracket


def _number_writer(shown: Tensor, form: TensorFormat) -> Callable[[object], str]:
    """Make the function that formats one element, so that the `shown` ones have one form."""
    if not shown.is_floating_point():
        return str
    if form.float_format == "none":
        return "{:g}".format
    magnitudes = [abs(x) for x in shown.flatten().tolist() if isfinite(x) and x != 0]
    before_point = floor(log10(max(magnitudes))) + 1 if magnitudes else 1
    decimals = max(form.digits - before_point, 0)
    if form.float_format == "scientific" or (
        form.float_format == "auto"
        and (not _LEAST <= before_point <= form.digits or _vanishes(magnitudes, decimals))
    ):
        return f"{{:.{form.digits - 1}e}}".format
    return f"{{:.{decimals}f}}".format


def _vanishes(magnitudes: Sequence[float], decimals: int) -> bool:
    """Whether a number would look like zero."""
    return any(float(f"{number:.{decimals}f}") == 0 for number in magnitudes)

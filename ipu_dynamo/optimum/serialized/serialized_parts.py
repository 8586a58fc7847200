"""Hold one part of a layer that is cut; a part that was filled up keeps that out of files."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from ipu_dynamo.ops.private.hooks import has_gradient_hooks


def part_sizes(total: int, parts: int) -> list[int]:
    """The rows of each part: equal, but for the last that have any, and those that have none."""
    rows = -(-total // parts)
    return [min(rows, max(0, total - number * rows)) for number in range(parts)]


def first_parts(parts: Sequence[nn.Module], splits: Sequence[int]) -> list[tuple[int, nn.Module]]:
    """The IPUs that have parts, each with the first of them.

    Raises:
        ValueError: the numbers are not of all parts.
    """
    if sum(splits) != len(parts) or min(splits, default=0) < 0:
        raise ValueError(f"splits {list(splits)} are not {len(parts)} parts in all")
    starts = accumulate(splits, initial=0)
    return [
        (ipu, parts[start])
        for ipu, (start, count) in enumerate(zip(starts, splits, strict=False))
        if count
    ]


class _Filled(nn.Module):
    """A layer whose weight has `real` rows, and zeros after them that are in no file."""

    real: int
    weight: Tensor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"][: self.real]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        name = prefix + "weight"
        kept = state_dict.get(name)
        if kept is not None and len(kept) == self.real < len(self.weight):
            fill = kept.new_zeros(len(self.weight) - self.real, *kept.shape[1:])
            state_dict = {**state_dict, name: torch.cat([kept, fill])}
        super()._load_from_state_dict(state_dict, prefix, *args)


def can_fill(parts: Sequence[_Filled], whole: nn.Module) -> bool:
    """Whether parts have the kind of numbers that a whole layer has, where it has them."""
    weight: Any = whole.weight
    return all((p.weight.dtype, p.weight.device) == (weight.dtype, weight.device) for p in parts)


def take_rows(parts: Sequence[_Filled], whole: nn.Module) -> None:
    """Give parts that `can_fill` the rows of a whole layer, and let them train as it does."""
    begin, weight = 0, cast(Tensor, whole.weight)
    for part in parts:
        with torch.no_grad():
            part.weight[: part.real] = weight[begin : begin + part.real]
        part.weight.requires_grad_(weight.requires_grad)
        begin += part.real


def check_replaceable(layer: nn.Module) -> None:
    """Raise ValueError unless a layer is its class and its parameters, and nothing more.

    Parts would not have the other things that users may have added to it.
    """
    own = {name for name, value in layer._parameters.items() if value is not None}
    more = [
        *("a weight that is computed from other parameters" for _ in {"weight"} - own),
        *(f"the parameter {name}" for name in sorted(own - {"weight", "bias"})),
        *(f"the module {name}" for name in layer._modules),
        *(f"the buffer {name}" for name in layer._buffers),
        *("a forward of its own" for _ in {"forward"} & vars(layer).keys()),
        *(
            f"hooks on its {name}"
            for name in sorted(own)
            if has_gradient_hooks(layer._parameters[name])
        ),
    ]
    if more:
        raise ValueError(
            f"a {type(layer).__name__} with {', '.join(more)} cannot be replaced by parts of it: "
            "leave its serialization factor and splits out"
        )


class EmbeddingPart(_Filled, nn.Embedding):
    """A part of an embedding's table."""


class LinearPart(_Filled, nn.Linear):
    """Some of a layer's outputs."""


def filled(weight: Tensor, begin: int, real: int, rows: int) -> Tensor:
    """A copy of rows `begin` to `begin + real`, and zeros up to `rows` of them."""
    part = weight.detach().new_zeros(rows, *weight.shape[1:])
    part[:real] = weight.detach()[begin : begin + real]
    return part

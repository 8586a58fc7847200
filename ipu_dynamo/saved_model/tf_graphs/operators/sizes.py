"""Compute with sizes that may be symbols."""

from typing import Any

import torch


def larger(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def smaller(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def ceil_div(a: Any, b: int) -> Any:
    return -(-a // b)


def axis_of(axis: int, rank: int, name: str) -> int:
    """An axis counted from the front.

    Raises:
        ValueError: the axis does not exist; the node is named.
    """
    if not -rank <= axis < rank:
        raise ValueError(f"node {name!r} has axis {axis} of {rank}")
    return axis % rank

"""Set how many threads work in one operator."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def intra_op_threads(number: int | None) -> Iterator[None]:
    """Compute with so many intra-op threads; None is torch's number.

    A thread whose first operator runs meanwhile keeps this number: torch hands it on.
    """
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)

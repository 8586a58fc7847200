"""Copy values of the program's first replica to the other ranks of a column."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_copy_
from ipu_dynamo.runtime.ranks.transport import Transport


class FirstReplica:
    """Copies of values of the first replica, which the first rank of a column runs.

    Args:
        transport: to the other ranks of the column.
        values: those of this rank's own first replica; contiguous or not, on the host.
        copies: tensors for the values of the program's first replica.
    """

    def __init__(
        self, transport: Transport, values: Sequence[Tensor], copies: Sequence[Tensor]
    ) -> None:
        self._transport, self._values, self._copies = transport, values, copies
        ends = [*accumulate((-(-t.nbytes // 16) * 16 for t in values), initial=0)]
        self._message = torch.zeros(ends[-1], dtype=torch.uint8)
        self._parts = [
            self._message[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (start, _), tensor in zip(pairwise(ends), values, strict=True)
        ]

    def exchange(self, *, writes: bool = True) -> None:
        """Bring the values, which `write` writes.

        Args:
            writes: without it the rank only takes part, for the others.
        """
        if writes and self._transport.share.row == 0:
            foreach_copy_(self._parts, self._values)
        self._transport.broadcast("column", self._message)

    def write(self) -> None:
        """Overwrite the copies. On the first rank they are the values themselves."""
        if self._transport.share.row:
            foreach_copy_(self._copies, self._parts)

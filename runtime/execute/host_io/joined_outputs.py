"""Join the values that micro-batches send to an output, as they arrive."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ipu_dynamo.program import Output
from ipu_dynamo.program.ir.layout import dense_strides


class JoinedOutput:
    """The joined value of an output: its blocks, or its sum so far.

    Assigning an item adds the value of that micro-batch. One worker adds all, in their order.

    Args:
        like: a tensor with shape, strides, dtype and device of the result.
    """

    def __init__(self, output: Output, like: Tensor, micro_batches: int) -> None:
        self._sums, self._shape = output.returns == "sum", like.shape
        repeated = {i for i, stride in enumerate(like.stride()) if stride == 0}
        if self._sums or output.dim in repeated:
            repeated = set()
        self._once = tuple(repeated)  # dimensions along which all elements are the same memory
        self._dense = torch.empty_strided(
            [1 if i in repeated else size for i, size in enumerate(like.shape)],
            like.stride() if repeated or 0 not in like.stride() else dense_strides(like.shape),
            dtype=like.dtype,
            device=like.device,
        )
        self._dim, self._outer = output.dim, output.outer
        self._parts: Sequence[Tensor] = ()
        if not self._sums:
            repetitions = self._dense.unflatten(self._dim, (self._outer, -1))
            self._parts = repetitions.tensor_split(micro_batches, self._dim + 1)

    def __setitem__(self, micro_batch: int, value: Tensor) -> None:
        for dim in self._once:
            value = value.narrow(dim, 0, 1)
        if not self._sums:
            self._parts[micro_batch].copy_(value.unflatten(self._dim, (self._outer, -1)))
        elif micro_batch == 0:
            self._dense.copy_(value)
        else:
            self._dense += value

    @property
    def value(self) -> Tensor:
        return self._dense.expand(self._shape) if self._once else self._dense

"""Compute operators of Keras' torch backend that read a tensor's values in Python without doing so.

Metrics count by them: `keras.ops.scatter` in confusion matrices, `segment_sum` and its like in
curves. Results are the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.keras.private.stateless_names import backend_core, backend_math
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

_SEGMENTS = "_segment_reduction_fn"
_IDENTITIES = {"sum": 0.0, "prod": 1.0, "amax": -float("inf"), "amin": float("inf")}


@contextmanager
def operators_value_free() -> Iterator[None]:
    """Let these operators be traced, in this thread."""
    scatter, reduce = backend_core.scatter, getattr(backend_math, _SEGMENTS)

    def reduce_segments(data: Any, segment_ids: Any, method: str, num_segments: Any) -> Any:
        if num_segments is None:  # their number is the largest value: that cannot be traced
            return reduce(data, segment_ids, method, num_segments)
        return _reduce_segments(data, segment_ids, method, int(num_segments))

    with ExitStack() as stack:
        stack.enter_context(replaced(backend_core, "scatter", in_this_thread(_scatter, scatter)))
        new = in_this_thread(reduce_segments, reduce)
        stack.enter_context(replaced(backend_math, _SEGMENTS, new))
        yield


def _scatter(indices: Any, values: Any, shape: Sequence[int]) -> Tensor:
    """Add `values` into zeros of `shape`, at `indices [..., index_length]`."""
    index: Tensor = backend_core.convert_to_tensor(indices)
    rows: Tensor = backend_core.convert_to_tensor(values)
    length = index.shape[-1]
    columns = index.long().reshape(-1, length).unbind(1)
    rows = rows.reshape(-1, *shape[length:])
    zeros = torch.zeros(tuple(shape), dtype=rows.dtype, device=rows.device)
    return zeros.index_put(columns, rows, accumulate=True)


def _reduce_segments(data: Tensor, segment_ids: Tensor, method: str, num_segments: int) -> Tensor:
    """Reduce the rows of each segment; rows of no segment go into one more, which is dropped."""
    valid = (segment_ids >= 0) & (segment_ids < num_segments)
    ids = torch.where(valid, segment_ids, num_segments).long()
    ids = ids.reshape(-1, *[1] * (data.ndim - 1)).expand(data.shape)
    shape = num_segments + 1, *data.shape[1:]
    start = torch.full(shape, _IDENTITIES[method], device=data.device)
    return start.scatter_reduce(0, ids, data.float(), method)[:-1].to(data.dtype)

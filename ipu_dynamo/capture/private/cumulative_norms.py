"""Let a traced batch norm with `momentum=None` average over all batches.

PyTorch reads the count of batches in Python, for the share of the newest one in the average. In a
program the count is a tensor, and so is the share.

Call     F.batch_norm(%x, %mean, %var, ..., training=True, momentum=1 / float(%count))
Recorded %y = F.batch_norm(%x, %m, %v, ..., training=True, momentum=1)     %m, %v: of this batch
         %mean.mul_(1 - 1 / %count).add_(%m / %count)                      %var alike
Keeps    values up to rounding; buffers; source lines.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from ipu_dynamo.ops.private.replacing import in_this_thread, replaced


@contextmanager
def batches_counted() -> Iterator[None]:
    """While tracing in this thread, such norms compute with the count."""
    original = BatchNorm.forward

    def forward(norm: BatchNorm, input: Tensor) -> Tensor:
        averages = norm.training and norm.track_running_stats and norm.momentum is None
        if not averages:
            return original(norm, input)
        norm._check_input_dim(input)
        return _normalised(norm, input)

    with replaced(BatchNorm, "forward", in_this_thread(forward, original)):
        yield


def _normalised(norm: BatchNorm, input: Tensor) -> Tensor:
    """Normalise a batch, and update the norm's averages."""
    count, averages = norm.num_batches_tracked, (norm.running_mean, norm.running_var)
    assert count is not None
    count.add_(1)
    mean, var = newest = [torch.zeros_like(average) for average in averages if average is not None]
    result = F.batch_norm(input, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    share = 1.0 / count.to(torch.float32)
    for average, new in zip(averages, newest, strict=True):
        assert average is not None
        factor = share.to(average.dtype)
        average.mul_(1 - factor).add_(new * factor)
    return result

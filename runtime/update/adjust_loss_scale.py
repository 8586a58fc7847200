"""Choose the next loss scale from how many elements of gradients were large."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ipu_dynamo.program import AdjustLossScale


class LossScaleAdjustment:
    """The instruction, prepared. It never waits for a device.

    Args:
        adjust: what to do.
        scale: f32[], the loss scale.
        within: i64[], sums over micro-batches and replicas of the elements that are not large.
        since: i64[], steps since the last change, and their count; empty for a period of one.
    """

    def __init__(
        self,
        adjust: AdjustLossScale,
        scale: Tensor,
        within: Sequence[Tensor],
        since: Sequence[Tensor] = (),
    ) -> None:
        self._adjust, self._scale, self._within, self._since = adjust, scale, within, since
        watched = adjust.watched * adjust.period
        self.last = scale.clone()  # before the last change
        self._least = watched - math.floor(adjust.share * watched)  # with fewer, it is halved

    def __call__(self) -> None:
        self.last.copy_(self._scale)
        within = torch.stack(list(self._within)).sum()
        if self._since:
            steps, so_far = self._since
            steps += 1
            so_far += within
            due, within = steps == self._adjust.period, so_far.clone()
            for number in self._since:
                number.masked_fill_(due, 0)
        wanted = torch.where(within < self._least, self._scale * 0.5, self._scale * 2.0)
        keep = (wanted < self._adjust.smallest) | (wanted > self._adjust.largest)
        if self._since:
            keep |= ~due
        self._scale.copy_(torch.where(keep, self._scale, wanted))

"""Measure what a batch costs the CTC decoder, against one sequence.

The scores are those of a recogniser that is sure of most time steps, and of noise; the beam has the
default width.
"""

import time

import torch
from torch import Tensor

from ipu_dynamo.ops.library.ctc_beam_search import ctc_beam_search

_TIME, _CLASSES, _BEAMS, _BATCH, _REPETITIONS = 100, 32, 100, 32, 5


def batches() -> dict[str, float]:
    """Milliseconds of CPU time of one sequence and of 32, and their ratio, on one thread."""
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name, spread in (("sure", 6.0), ("noise", 3.0)):
        one, all_ = (_seconds(_scores(batch, spread)) for batch in (1, _BATCH))
        figures |= {
            f"{name}: 1, ms": 1e3 * one,
            f"{name}: {_BATCH}, ms": 1e3 * all_,
            f"{name}: {_BATCH} in times of 1": all_ / one,
        }
    return figures


def _scores(batch: int, spread: float) -> Tensor:
    torch.manual_seed(0)
    scores = torch.randn(_TIME, batch, _CLASSES) * spread
    scores[..., 0] += spread * (spread > 3) * 2
    return scores.log_softmax(2)


def _seconds(log_probs: Tensor) -> float:
    lengths = torch.full(log_probs.shape[1:2], _TIME)
    best = float("inf")
    for _ in range(_REPETITIONS):
        start = time.process_time()
        ctc_beam_search(log_probs, lengths, 0, _BEAMS, 1)
        best = min(best, time.process_time() - start)
    return best

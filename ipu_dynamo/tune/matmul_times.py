"""Measure once per machine how long each library takes for a class of matmuls, and keep the answer.

The figures decide which library a stage calls.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.private.native import onednn_pack
from ipu_dynamo.tune.autotune_cache import kept_figures
from ipu_dynamo.tune.matmul_classes import MatmulClass, example_of
from ipu_dynamo.tune.microbenchmark import one_thread, shortest_times

log = logging.getLogger(__name__)
Way = Literal["torch", "onednn", "packed"]
Times = Mapping[MatmulClass, Mapping[Way, float]]
_SECONDS = 0.05  # for each class


def matmul_times(matmul: MatmulClass) -> Mapping[Way, float] | None:
    """Seconds of one matmul of a class in each way.

    None where no folder keeps them: another process would choose otherwise.
    """
    key = str(matmul)
    kept = kept_figures("matmuls", key, [key], lambda: {key: measure(matmul)})
    return kept[key] if kept else None  # type: ignore[return-value]


def measure(matmul: MatmulClass) -> dict[str, float]:
    """Time a matmul of a class by each library, in less than a tenth of a second as a rule."""
    with one_thread():
        times = shortest_times(_ways(matmul), _SECONDS)
    log.info("%s measured: %s", matmul, times)
    return {str(way): seconds for way, seconds in times.items()}


def _ways(matmul: MatmulClass) -> dict[Way, Callable[[], object]]:
    a, b = example_of(matmul)
    if matmul.size == "batched":
        return {"torch": lambda: torch.bmm(a, b), "onednn": lambda: onednn.batched(a, b)}
    ways: dict[Way, Callable[[], object]] = {
        "torch": lambda: torch.mm(a, b),
        "onednn": lambda: onednn.matmul(a, b, None, "none"),
    }
    if matmul.form == "a @ b.t()":
        weight = onednn_pack(b.t(), a.shape[0])
        ways["packed"] = lambda: onednn.packed(a, weight, None, "none")
    return ways

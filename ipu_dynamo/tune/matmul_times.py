"""Measure once per machine how long each library takes for matmuls, and keep the answer.

The figures decide which library a stage calls.
"""

import logging
import time
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch

from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.private.locks import fork_safe_lock
from ipu_dynamo.ops.private.native import onednn_pack
from ipu_dynamo.tune.artifact_store import open_store
from ipu_dynamo.tune.autotune_cache import Figures, kept_figures
from ipu_dynamo.tune.machine_name import machine_name
from ipu_dynamo.tune.matmul_classes import MEASURED, MatmulClass, example_of
from ipu_dynamo.tune.microbenchmark import one_thread, shortest_times

log = logging.getLogger(__name__)
Way = Literal["torch", "onednn", "packed"]
Times = Mapping[MatmulClass, Mapping[Way, float]]
_SECONDS = 0.05  # for each class
_lock = fork_safe_lock()


def matmul_times() -> Times | None:
    """Seconds of one matmul of each class.

    None where no folder keeps them: another process would choose otherwise.
    """
    with _lock:
        store = open_store()
        return _times_in(store.folder, machine_name()) if store else None


def forget() -> None:
    """Read the file again when it is needed next."""
    _times_in.cache_clear()


@cache
def _times_in(folder: Path, machine: str) -> Times | None:
    path = folder / "matmuls" / f"{sha256(machine.encode()).hexdigest()[:32]}.json"
    names = {str(matmul): matmul for matmul in MEASURED}

    def figures() -> Figures:
        times = measure().items()
        return {str(matmul): {str(way): s for way, s in ways.items()} for matmul, ways in times}

    kept = kept_figures(path, machine, names, figures)
    return kept and {names[name]: ways for name, ways in kept.items()}  # type: ignore[return-value]


def measure() -> Times:
    """Time a matmul of each class by each library, in less than a second on a usual machine."""
    start = time.thread_time()
    with one_thread():
        times = {matmul: shortest_times(_ways(matmul), _SECONDS) for matmul in MEASURED}
    log.info("matmuls measured in %.2f s of one core", time.thread_time() - start)
    return times


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

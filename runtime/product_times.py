"""Measure once per machine how long each library takes for matrix products, and keep the answer.

The figures decide which library a stage calls. They are of one thread, and count the time that it
computed: those of several threads collapse while others use the machine, and stages with different
numbers of threads have to choose alike.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

import torch

from ipu_dynamo.runtime import onednn
from ipu_dynamo.runtime.kept_figures import Figures, kept_figures
from ipu_dynamo.runtime.machine_name import machine_name
from ipu_dynamo.runtime.product_classes import MEASURED, ProductClass, example_of
from ipu_dynamo.runtime.stage_store import open_store
from ipu_dynamo.runtime.torch_private import onednn_pack

log = logging.getLogger(__name__)
Way = Literal["torch", "onednn", "packed"]
Times = Mapping[ProductClass, Mapping[Way, float]]
_SECONDS = 0.05  # for each class
_ROUNDS = 3  # at least
W = TypeVar("W", bound=str)
_lock = threading.Lock()


def product_times() -> Times | None:
    """Seconds of one product of each class.

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
    path = folder / "products" / f"{sha256(machine.encode()).hexdigest()[:32]}.json"
    names = {str(one): one for one in MEASURED}

    def figures() -> Figures:
        times = measure().items()
        return {str(one): {str(way): s for way, s in ways.items()} for one, ways in times}

    kept = kept_figures(path, machine, names, figures)
    return kept and {names[name]: ways for name, ways in kept.items()}  # type: ignore[return-value]


def measure() -> Times:
    """Time a product of each class by each library, in less than a second on a usual machine."""
    start, threads = time.thread_time(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            times = {one: fastest(_ways(one)) for one in MEASURED}
    finally:
        torch.set_num_threads(threads)
    log.info("matrix products measured in %.2f s of one core", time.thread_time() - start)
    return times


def _ways(one: ProductClass) -> dict[Way, Callable[[], object]]:
    a, b = example_of(one)
    if one.size == "batched":
        return {"torch": lambda: torch.bmm(a, b), "onednn": lambda: onednn.batched(a, b)}
    ways: dict[Way, Callable[[], object]] = {
        "torch": lambda: torch.mm(a, b),
        "onednn": lambda: onednn.matmul(a, b, None, "none"),
    }
    if one.form == "a @ b.t()":
        weight = onednn_pack(b.t(), a.shape[0])
        ways["packed"] = lambda: onednn.packed(a, weight, None, "none")
    return ways


def fastest(ways: Mapping[W, Callable[[], object]], seconds: float = _SECONDS) -> dict[W, float]:
    """The fastest of several calls of each, in turn, so that a busy machine slows all alike.

    Args:
        seconds: to spend on all of them.
    """
    fine = time.get_clock_info("thread_time").resolution < 1e-6
    clock = time.thread_time if fine else time.perf_counter
    spent: dict[W, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    end, rounds = clock() + seconds, 0
    while clock() < end or rounds < _ROUNDS:
        rounds += 1
        for way, call in ways.items():
            start = clock()
            call()
            spent[way].append(clock() - start)
    return {way: min(times) for way, times in spent.items()}

"""Measure once per machine how long each library takes for matrix products, and keep the answer.

The figures decide which library a stage calls, and so the last bits of its results. Therefore the
first complete measurement stays, for all later processes, until its file is removed. They are of
one thread, and count the time that it computed: those of several threads collapse while others use
the machine, and stages with different numbers of threads have to choose alike.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch

from ipu_dynamo.runtime import onednn
from ipu_dynamo.runtime.machine_name import machine_name
from ipu_dynamo.runtime.product_classes import MEASURED, ProductClass, example_of
from ipu_dynamo.runtime.stage_store import keep_first, open_store, replace_file
from ipu_dynamo.runtime.torch_private import onednn_pack

log = logging.getLogger(__name__)
Way = Literal["torch", "onednn", "packed"]
Times = Mapping[ProductClass, Mapping[Way, float]]
_SECONDS = 0.05  # for each class
_ROUNDS = 3  # at least
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
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return _read(path, machine)
    except FileNotFoundError:
        keep = keep_first
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s): products are measured again", path, error)
        keep = replace_file
    try:
        keep(path, _written(measure(), machine))
        return _read(path, machine)
    except OSError as error:  # a full disk: what is not kept must not decide
        log.warning("times of products cannot be kept in %s: %s", folder, error)
        return None


def _written(times: Times, machine: str) -> bytes:
    seconds = {str(one): ways for one, ways in times.items()}
    content = json.dumps({"machine": machine, "seconds": seconds}, indent=1)
    return f"{content}\n{sha256(content.encode()).hexdigest()}\n".encode()


def _read(path: Path, machine: str) -> Times:
    """What a file holds.

    Raises:
        ValueError, KeyError, TypeError: it is not as it was written.
    """
    text, _, digest = path.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")
    if sha256(text.encode()).hexdigest() != digest:
        raise ValueError("its checksum differs")
    content = json.loads(text)
    if content["machine"] != machine:
        raise ValueError("it is another machine's")
    seconds = content["seconds"]
    return {one: seconds[str(one)] for one in MEASURED}


def measure() -> Times:
    """Time a product of each class by each library, in less than a second on a usual machine."""
    start, threads = time.thread_time(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            times = {one: _fastest(_ways(one)) for one in MEASURED}
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


def _fastest(ways: Mapping[Way, Callable[[], object]]) -> dict[Way, float]:
    """The fastest of several calls of each, in turn, so that a busy machine slows all alike."""
    fine = time.get_clock_info("thread_time").resolution < 1e-6
    clock = time.thread_time if fine else time.perf_counter
    spent: dict[Way, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    end = clock() + _SECONDS
    while clock() < end or len(spent["torch"]) < _ROUNDS:
        for way, call in ways.items():
            start = clock()
            call()
            spent[way].append(clock() - start)
    return {way: min(seconds) for way, seconds in spent.items()}

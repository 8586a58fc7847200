"""Compare how much memory steps need at their peak, on Linux, and how long they take.

Each contender runs in two processes. The first measures the peak memory of a step, above the memory
held between steps. There the C library returns freed memory at once (a fixed threshold for mmap),
so that the peak is that of the step. The second measures the time of a step with the C library's
defaults, as users have them.
"""

import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from benchmarks.child import Child
from benchmarks.measure import Figures, medians

Found = Mapping[str, Figures]  # of contenders, by name: the medians of those before

# For the environment of the measured process: memory above this size is returned when freed.
THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Contenders whose memory is compared with that of the first one.

    Args:
        contenders: `module:name` of a function that makes a maker of each one's step, by name; its
            argument has the figures of the contenders that have run.
        what: the work, in a few words.
        clock: a function of `time`, which says what a step takes.
    """

    contenders: str
    what: str
    clock: str = "perf_counter"


CASES = {
    "recompute": Memory(
        "benchmarks.recompute:contenders", "12 layers, width 256, 4 x 256 tokens", "process_time"
    ),
    "serialized_head": Memory(
        "benchmarks.training:serialized_head",
        "a head of 512 tokens, width 512, vocabulary 50,304, in 16 parts",
    ),
}


def measure(case: Memory, rounds: int) -> dict[str, list[Figures]]:
    """Run every contender in turn, so many times: bytes and seconds of a step, and its loss."""
    found: dict[str, list[Figures]] = {who: [] for who in resolve_name(case.contenders)({})}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for who in found:
                given = case.contenders, who, medians(found)
                with Child(Path(folder), **THRESHOLD) as child:
                    figures: Figures = child.call("benchmarks.peak_memory:step_bytes", *given)
                with Child(Path(folder)) as child:
                    asked = "benchmarks.peak_memory:step_seconds", *given, case.clock
                    found[who].append(figures | child.call(*asked))
    return found


def step_bytes(contenders: str, who: str, found: Found) -> Figures:
    """By how much a step raises the memory of this process, and its loss."""
    step, loss = _warm(contenders, who, found)
    return {"nbytes": peak_bytes(step), "loss": loss}


def step_seconds(contenders: str, who: str, found: Found, clock: str) -> Figures:
    """The median time of a step by a clock."""
    step, now = _warm(contenders, who, found)[0], getattr(time, clock)
    seconds = []
    for _ in range(5):
        start = now()
        step()
        seconds.append(now() - start)
    return {"seconds": statistics.median(seconds)}


def _warm(contenders: str, who: str, found: Found) -> tuple[Callable[[], Any], float]:
    """A step that was made twice, and its loss."""
    torch.manual_seed(0)
    step = resolve_name(contenders)(found)[who]()
    step()
    return step, float(step())


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes of resident memory that `work` needs at its peak, beyond those held before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"{key}:\s+(\d+) kB", text)
    return 1024 * int(kilobytes)

"""Compare how much memory steps need at their peak, on Linux, and how long they take.

Each contender runs in two processes. The first measures the peak memory of a step, above the memory
held between steps. There the C library returns freed memory at once (a fixed threshold for mmap),
so that the peak is that of the step. The second measures the time of a step with the C library's
defaults, as users have them.
"""

import argparse
import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from benchmarks.child import Child
from benchmarks.measure import Figures, medians
from benchmarks.provenance import write_json

Found = Mapping[str, Figures]  # of contenders, by name: the medians of those before

# For the environment of the measured process: memory above this size is returned when freed.
THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main(contenders: str, title: str, clock: str) -> Found:
    """Read the command line, run every contender, in turn, and print a table.

    Args:
        contenders: `module:name` of a function that makes a maker of each one's step, by name; its
            argument has the figures of the contenders that have run.
        title: of the table.
        clock: a function of `time`, which says what a step takes.
    """
    module, _, _ = contenders.partition(":")
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--engine", default="auto", help="of our steps; auto: the default one")
    parser.add_argument("--repetitions", type=int, default=3, help="figures are medians over these")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    arguments = parser.parse_args()
    found: dict[str, list[Figures]] = {who: [] for who in resolve_name(contenders)({})}
    engine = {} if arguments.engine == "auto" else {"IPU_DYNAMO_ENGINE": arguments.engine}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repetitions):
            for who in found:
                figures: Figures = {}
                given = contenders, who, medians(found)
                with Child(Path(folder), **engine, **THRESHOLD) as child:
                    figures |= child.call("benchmarks.peak_memory:step_bytes", *given)
                with Child(Path(folder), **engine) as child:
                    figures |= child.call("benchmarks.peak_memory:step_seconds", *given, clock)
                found[who].append(figures)
    table = medians(found)
    plain = next(iter(table.values()))
    print(title)
    for who, row in table.items():
        print(
            f"  {who:<16} extra memory {row['nbytes'] / 2**20:7.1f} MiB"
            f" ({row['nbytes'] / plain['nbytes']:4.2f})   step {1e3 * row['seconds']:7.1f} ms"
            f" ({row['seconds'] / plain['seconds']:4.2f})   loss {row['loss']:.6f}"
        )
    if arguments.json:
        write_json(arguments.json, {module.rpartition(".")[2]: found})
    return table


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

"""Measure by how much a piece of work raises the memory of this process, on Linux."""

import gc
import re
from collections.abc import Callable
from pathlib import Path

# For the environment of the measured process: memory above this size is returned when freed.
THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes of resident memory that `work` needs at its peak, beyond what is held before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"{key}:\s+(\d+) kB", text)
    return 1024 * int(kilobytes)

"""Count the bytes that a piece of work holds at its peak, as PyTorch's allocator hands them out."""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that `work` holds at its peak beyond what is held before it, in this thread.

    The same work has the same peak in every run, which resident memory has not.
    """
    gc.collect()
    gc.disable()  # a collection in the middle would free what the last call left
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
    finally:
        gc.enable()
    results = profiled.profiler.kineto_results
    live: dict[int, int] = {}  # bytes of the blocks that `work` has taken, by address
    held = peak = 0
    for _, nbytes, address in sorted(_allocations(results.experimental_event_tree())):
        if nbytes > 0:
            live[address] = nbytes
            held += nbytes
        else:  # PyTorch notes by chance only that a block was freed that is older than `work`
            held -= live.pop(address, 0)
        peak = max(peak, held)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """When memory was taken (or, if negative, freed), how many bytes, and where."""
    for event in events:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, fields.alloc_size, fields.ptr
        yield from _allocations(event.children)

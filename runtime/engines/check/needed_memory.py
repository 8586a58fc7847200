"""Count the memory that a check takes, and that of this computer."""

import os
from functools import cache
from pathlib import Path

from torch import Tensor

from ipu_dynamo.ops.graph_queries import only_looks, owner
from ipu_dynamo.program import Function
from ipu_dynamo.runtime.engines.check.classes import tensors_of

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def bytes_needed(function: Function) -> int:
    """Count the bytes of a check: two copies of written arguments, and the reference's peak."""
    graph = function.graph.graph
    last = {owner(source): node for node in graph.nodes for source in node.all_input_nodes}
    ends: dict[object, int] = {}
    now = peak = 0
    for node in graph.nodes:
        if node.op == "call_function" and not only_looks(node):
            size = sum(map(_bytes, tensors_of(node)))
            now += size
            if node in last:
                ends[last[node]] = ends.get(last[node], 0) + size
        peak = max(peak, now)
        now -= ends.pop(node, 0)
    inputs = graph.find_nodes(op="placeholder")
    copied = sum(_bytes(t) for place in function.written for t in tensors_of(inputs[place]))
    return 2 * copied + peak


@cache
def memory_here() -> int:
    """The bytes of memory that this computer, or the group of this process, has."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if _has_pages() else []
    for name in _LIMITS:
        try:
            found.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # the group does not exist, or `max`
            continue
    return min(found, default=1 << 62)


def _has_pages() -> bool:
    return hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""Hold a program as a search for stages sees it: its nodes in order, with costs and bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkNode:
    """A node of the work list.

    Attributes:
        name: the canonical one.
        cycles: its cost; of measured nodes their seconds at the clock of an IPU.
        always_live_bytes: of the parameters that it is the first to read.
        transient_bytes: of its results.
        seconds: as measured; None where cycles are estimated.
    """

    name: str
    cycles: int
    always_live_bytes: int
    transient_bytes: int
    seconds: float | None = None

    @property
    def nbytes(self) -> int:
        """All its bytes, which a search balances and moves between stages."""
        return self.always_live_bytes + self.transient_bytes


@dataclass(frozen=True, slots=True)
class IpuMemory:
    """The bytes of an IPU; `free` is negative where it is overfull."""

    used: int
    free: int

    @property
    def overflow(self) -> int:
        return max(0, -self.free)


def memory_of(nodes: Iterable[WorkNode], memory_per_ipu: int) -> IpuMemory:
    """The memory of nodes on one IPU: all that always lives, and the largest transient bytes."""
    nodes = list(nodes)
    used = sum(node.always_live_bytes for node in nodes)
    used += max((node.transient_bytes for node in nodes), default=0)
    return IpuMemory(used, memory_per_ipu - used)


def memory_of_ipus(
    nodes: Sequence[WorkNode],
    stages: Mapping[str, int],
    device_mapping: Sequence[int],
    num_ipus: int,
    memory_per_ipu: int,
) -> list[IpuMemory]:
    """The bytes of every IPU, of which one may have several stages."""
    return [
        memory_of(
            (node for node in nodes if device_mapping[stages[node.name]] == ipu), memory_per_ipu
        )
        for ipu in range(num_ipus)
    ]

"""Search the fewest IPUs whose stages fit, one stage for each, and balance them.

Source: IPU TensorFlow Addons, "IPU SavedModel CLI", auto pipelines. The search is a function of
costs, bytes, memory and limits alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ipu_dynamo.saved_model.conversion.pipelines.cost_constants import RESERVE_PERCENT
from ipu_dynamo.saved_model.conversion.pipelines.find_split import first_split
from ipu_dynamo.saved_model.conversion.pipelines.work_list import IpuMemory, WorkNode, memory_of

SPLIT_FILE = "greedy_search_solutions.pipeconf"
Sizes = tuple[int, ...]  # nodes of each stage


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a search.

    Attributes:
        priority: `cycle` or `memory`, whichever is balanced.
    """

    memory_per_ipu: int
    priority: str = "cycle"
    fine_tune_iter: int = 5
    min_ipu_quantity: int = 2
    max_ipu_quantity: int = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """Stages that fit.

    Attributes:
        sizes: how many nodes each stage has.
        file: name of the solution file.
    """

    sizes: Sizes
    file: str


@dataclass
class Search:
    """A search over numbers of IPUs.

    Args:
        watch: called for each candidate, with the number of stages, whether they are being tuned,
            and their sizes.
    """

    nodes: Sequence[WorkNode]
    limits: Limits
    watch: Callable[[int, bool, Sizes], None] = lambda stages, tuning, sizes: None
    _last: list[IpuMemory] = field(default_factory=list)

    def run(self) -> Choice:
        """The first number of IPUs with stages that fit.

        Raises:
            ValueError: there is none.
        """
        for stages in quantities(self.limits):
            if len(self.nodes) >= stages and (choice := self._try(stages)):
                return choice
        raise ValueError(self._why_not())

    def _try(self, stages: int) -> Choice | None:
        chunk = len(self.nodes) // stages + 1
        counts = [0] * stages
        for index in range(len(self.nodes)):
            counts[min(index // chunk, stages - 1)] += 1
        if not self._keeps_reserve(self._look(stages, False, tuple(counts))):
            return None
        by_cycles = self.limits.priority == "cycle"
        costs = [node.cycles if by_cycles else node.nbytes for node in self.nodes]
        sizes = first_split(costs, stages)
        assert sizes is not None, "there are as many nodes as stages"
        memory = self._look(stages, False, sizes)
        if self._keeps_reserve(memory) and _fits(memory):
            return Choice(sizes, SPLIT_FILE)
        for turn in range(self.limits.fine_tune_iter):
            sizes = tuned(self.nodes, sizes, memory)
            memory = self._look(stages, True, sizes)
            if _fits(memory):
                return Choice(sizes, f"greedy_search_solutions_tune_{turn}.pipeconf")
        return None

    def _look(self, stages: int, tuning: bool, sizes: Sizes) -> list[IpuMemory]:
        self.watch(stages, tuning, sizes)
        self._last = [
            memory_of(part, self.limits.memory_per_ipu) for part in cut(self.nodes, sizes)
        ]
        return self._last

    def _keeps_reserve(self, memory: Sequence[IpuMemory]) -> bool:
        reserve = self.limits.memory_per_ipu * RESERVE_PERCENT // 100
        return sum(ipu.free for ipu in memory) >= reserve

    def _why_not(self) -> str:
        low, high = self.limits.min_ipu_quantity, self.limits.max_ipu_quantity
        if not self._last:
            return (
                f"pipeline_cfg: the program has {len(self.nodes)} nodes for stages, fewer than IPUs"
                f" (min_ipu_quantity {low}, max_ipu_quantity {high})"
            )
        used = [ipu.used for ipu in self._last]
        free = [ipu.free for ipu in self._last]
        return (
            f"pipeline_cfg: no stages fit on up to {high} IPUs (max_ipu_quantity); the last try "
            f"was {len(self._last)} IPUs with {used} bytes used and {free} bytes free"
        )


def quantities(limits: Limits) -> list[int]:
    """The numbers of IPUs to try, ascending: powers of two from 2 on.

    Raises:
        ValueError: the limits include no power of two.
    """
    low, high = limits.min_ipu_quantity, limits.max_ipu_quantity
    numbers = [2**power for power in range(1, 65) if max(2, low) <= 2**power <= high]
    if not numbers:
        raise ValueError(
            f"pipeline_cfg: no power of two from 2 on lies between min_ipu_quantity {low} and "
            f"max_ipu_quantity {high}"
        )
    return numbers


def cut(nodes: Sequence[WorkNode], sizes: Sizes) -> list[Sequence[WorkNode]]:
    """The nodes of each stage."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [nodes[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def tuned(nodes: Sequence[WorkNode], sizes: Sizes, memory: Sequence[IpuMemory]) -> Sizes:
    """Stages after each overfull one has given nodes to a neighbour, from left to right.

    Args:
        memory: of the stages before; it decides how many nodes a stage gives away.
    """
    new = list(sizes)
    for stage, ipu in enumerate(memory):
        neighbours = [n for n in (stage - 1, stage + 1) if 0 <= n < len(sizes)]
        if not ipu.overflow or not neighbours or new[stage] < 2:
            continue
        to = max(neighbours, key=lambda n: (memory[n].free, -n))
        start = sum(new[:stage])
        own = nodes[start : start + new[stage]]
        leaving = own if to < stage else own[::-1]
        count, nbytes, half = 0, 0, (memory[to].free - ipu.free) / 2
        while count < len(own) - 1 and nbytes + leaving[count].nbytes <= half:
            nbytes += leaving[count].nbytes
            count += 1
        count = max(count, 1)
        new[stage] -= count
        new[to] += count
    return tuple(new)


def _fits(memory: Sequence[IpuMemory]) -> bool:
    return not any(ipu.overflow for ipu in memory)

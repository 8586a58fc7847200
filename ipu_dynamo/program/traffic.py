"""Count the bytes that IPUs send each other, move to streaming memory, or get from replicas."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ipu_dynamo.program.ir.base_instruction import Moved
from ipu_dynamo.program.ir.instructions import Instruction, Repeat

_COUNTED = ("stored", "loaded", "gathered", "scattered", "exchanged")
Links = Counter[tuple[int, int]]  # (from, to): bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Count bytes that move. `stored` and `loaded` are to and from streaming memory. The others
    move between replicas: shards of variables (`gathered`) and of sums (`scattered`), and values
    of a micro-batch (`exchanged`)."""

    stored: int = 0
    loaded: int = 0
    gathered: int = 0
    scattered: int = 0
    exchanged: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.stored + other.stored,
            self.loaded + other.loaded,
            self.gathered + other.gathered,
            self.scattered + other.scattered,
            self.exchanged + other.exchanged,
        )

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(
            self.stored * times,
            self.loaded * times,
            self.gathered * times,
            self.scattered * times,
            self.exchanged * times,
        )

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.off_chip, self.between_replicas))) or "nothing"

    @property
    def off_chip(self) -> str:
        """The bytes to and from streaming memory, as text; empty for nothing."""
        moved = f"{self.stored} bytes stored, {self.loaded} bytes loaded"
        return moved if self.stored or self.loaded else ""

    @property
    def between_replicas(self) -> str:
        """The bytes that replicas get from each other, as text; empty for nothing."""
        moved = f"{self.gathered} bytes gathered, {self.scattered} bytes scattered"
        shards = moved if self.gathered or self.scattered else ""
        values = f"{self.exchanged} bytes exchanged" if self.exchanged else ""
        return ", ".join(filter(None, (shards, values)))


def moves(body: Sequence[Instruction], times: int = 1) -> Iterator[tuple[Moved, int]]:
    """Yield each move of `times` runs of `body`, with its count."""
    for instruction in body:
        if isinstance(instruction, Repeat):
            yield from moves(instruction.body, times * instruction.count)
        for move in instruction.moves:
            yield move, times


def exchanged(body: Sequence[Instruction]) -> Links:
    """Count the bytes that one run of `body` copies from each IPU to each other one."""
    total: Links = Counter()
    for move, times in moves(body):
        if isinstance(move.src, int) and isinstance(move.dst, int):
            total[move.src, move.dst] += times * (move.nbytes or 0)
    return total


def traffic(body: Sequence[Instruction]) -> Traffic:
    """Count the bytes of one run of `body` to and from streaming memory, and between replicas."""
    total = Traffic()
    for move, times in moves(body):
        if move.how in _COUNTED:
            total += Traffic(**{move.how: times * (move.nbytes or 0)})
    return total

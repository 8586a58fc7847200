"""Count the bytes that move between IPUs and streaming memory, and between replicas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes `stored` in streaming memory, and `loaded` from it; bytes that replicas get from each
    other: shards of variables that are `gathered`, and of sums that are `scattered`."""

    stored: int = 0
    loaded: int = 0
    gathered: int = 0
    scattered: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.stored + other.stored,
            self.loaded + other.loaded,
            self.gathered + other.gathered,
            self.scattered + other.scattered,
        )

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(
            self.stored * times,
            self.loaded * times,
            self.gathered * times,
            self.scattered * times,
        )

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.off_chip, self.between_replicas))) or "nothing"

    @property
    def off_chip(self) -> str:
        """What streaming memory has to do with, as text; empty for nothing."""
        moved = f"{self.stored} bytes stored, {self.loaded} bytes loaded"
        return moved if self.stored or self.loaded else ""

    @property
    def between_replicas(self) -> str:
        """What replicas get from each other, as text; empty for nothing."""
        moved = f"{self.gathered} bytes gathered, {self.scattered} bytes scattered"
        return moved if self.gathered or self.scattered else ""

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

    def lines(self) -> list[str]:
        """What a call moves, as far as it moves something."""
        off_chip = f"{self.stored} bytes stored, {self.loaded} bytes loaded"
        shards = f"{self.gathered} bytes gathered, {self.scattered} bytes scattered"
        return [
            *([f"streaming memory: {off_chip} in a call"] if self.stored or self.loaded else []),
            *([f"between replicas: {shards} in a call"] if self.gathered or self.scattered else []),
        ]

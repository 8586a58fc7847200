"""Count the bytes that move between IPUs and streaming memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes `stored` in streaming memory, and `loaded` from it."""

    stored: int = 0
    loaded: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.stored + other.stored, self.loaded + other.loaded)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.stored * times, self.loaded * times)

    def __str__(self) -> str:
        return f"{self.stored} bytes stored, {self.loaded} bytes loaded"

"""Describe a decision of a host pass with its reason, to be printed, explained and kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice of a host pass for a step, for a function, or for operators of it.

    Args:
        by: the pass.
        choice: the chosen way.
        reason: why, if the figures do not say it.
        function: whose operators it is about; empty: the whole step.
        of: which operators; empty: all.
        count: how many of them.
        seconds: of each choice, as measured or estimated.
    """

    by: str
    choice: str
    reason: str = ""
    function: str = ""
    of: str = ""
    count: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """`2 x small a @ b.t(): onednn  (torch 31 us, onednn 20 us)`."""
        subject = f"{self.count} x {self.of}: " if self.of else ""
        times = ", ".join(f"{way} {1e6 * s:.0f} us" for way, s in self.seconds.items())
        reason = ": ".join(filter(None, (self.choice, self.reason)))
        return f"{subject}{reason}" + (f"  ({times})" if times else "")

    def __str__(self) -> str:
        return f"{self.by}: {self.about}"

"""List the differences from the old checkout that are there on purpose."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["graphs", "bits", "states"]  # `states`: of all bits the optimiser's state alone


@dataclass(frozen=True, slots=True)
class Expected:
    """A difference that is no fault.

    Args:
        pattern: the names of configurations, as a shell pattern: `*/dropout/*`.
        kinds: what may differ.
        reason: why, for the reader of the table.
    """

    pattern: str
    kinds: frozenset[Kind]
    reason: str

    def covers(self, name: str, kind: Kind) -> bool:
        """Whether this difference of a configuration is the one that is meant."""
        return kind in self.kinds and fnmatchcase(name, self.pattern)


EXPECTED: tuple[Expected, ...] = ()

"""Say of a public program what it needs and what must hold when it has run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Names = Mapping[str, Any]  # what the script's module holds at its end
Check = Callable[[Names, str], None]  # of these and of what it has printed


@dataclass(frozen=True)
class Program:
    """A script of a public repository.

    Args:
        path: in the repository.
        check: raises AssertionError unless what the name and the docstring of this function claim
            is true.
        arguments: of its command line.
        without: statements that are left out: they hold for downloaded weights only.
        files: what has to be in the working directory, by path.
    """

    path: str
    check: Check
    arguments: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join((self.path, *self.arguments))

    @property
    def claim(self) -> str:
        return self.check.__name__.replace("_", " ")

"""Say of a public program where it is, what it needs, and what must hold when it has run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Names = Mapping[str, Any]  # what the script's module holds at its end
Check = Callable[[Names, str], None]  # of these and of what it has printed


@dataclass(frozen=True)
class Repository:
    """Where programs come from.

    Args:
        name: its last word, by which a clone of it is given.
        url: where it is fetched from.
        commit: what is fetched.
    """

    name: str
    url: str
    commit: str


@dataclass(frozen=True)
class Program:
    """A script of a public repository.

    Args:
        repository: where it comes from.
        path: in the repository.
        check: raises AssertionError unless what the name and the docstring of this function claim
            is true.
        arguments: of its command line.
        without: statements that are left out: they hold for downloaded weights only, or draw.
        sizes: what is replaced in its text, each of which must be there, so that it ends soon.
        files: what has to be in the working directory, by path.
        folder: of the repository, that it lies in and needs as a whole: its working directory.
        edits: as sizes, for other files of that folder, by path in it.
        pictures: files with random ones.
        prepare: writes more files of the working directory.
        packages: what pip has to fetch for it, without their dependencies.
        beside: packages that it imports, by name, and where their folders are.
        inert: modules that it imports and that may do nothing.
        enough: after so many training calls it need not go on.
    """

    repository: Repository
    path: str
    check: Check
    arguments: Sequence[str] = ()
    without: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    edits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()
    prepare: Callable[[], None] | None = None
    packages: tuple[str, ...] = ()
    beside: Mapping[str, tuple[Repository, str]] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    enough: int = 0

    @property
    def name(self) -> str:
        return " ".join((self.path, *self.arguments))

    @property
    def claim(self) -> str:
        return self.check.__name__.replace("_", " ")

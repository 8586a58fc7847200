"""Fetch the sources of programs by git, or read them from a clone or mirror on disk."""

import subprocess
import tempfile
from pathlib import Path

from tests.programs.program import Repository


class NotFetched(Exception):
    """The sources of a program cannot be had."""


class Sources:
    """One commit of a repository.

    Args:
        repository: where it is fetched from, and which commit.
        local: a clone, a bare repository or a mirror to read instead.
    """

    def __init__(self, repository: Repository, local: Path | None = None) -> None:
        self._repository, self._local = repository, local
        self._fetched: tempfile.TemporaryDirectory[str] | None = None

    def read(self, path: str) -> str:
        """The text of a file.

        Raises:
            NotFetched: there is no repository, or it has no such file.
        """
        return _git("-C", str(self._folder()), "show", f"{self._repository.commit}:{path}")

    def _folder(self) -> Path:
        if self._local is not None:
            return self._local
        if self._fetched is None:
            folder = tempfile.TemporaryDirectory(prefix="programs_")
            _git("init", "--quiet", folder.name)
            wanted = self._repository.url, self._repository.commit
            _git("-C", folder.name, "fetch", "--quiet", "--depth=1", *wanted)
            self._fetched = folder
        return Path(self._fetched.name)


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise NotFetched(
            f"git {' '.join(arguments)}: {result.stderr.strip()}\n"
            "  try:  --source NAME=FOLDER with a clone of the repository"
        )
    return result.stdout

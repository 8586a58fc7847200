"""Fetch the sources of programs by git, or read them from a clone or mirror on disk."""

import subprocess
import tempfile
from pathlib import Path


class NotFetched(Exception):
    """The sources of a program cannot be had."""


class Sources:
    """One commit of a repository.

    Args:
        url: where it is fetched from.
        commit: what is fetched.
        local: a clone, a bare repository or a mirror to read instead.
    """

    def __init__(self, url: str, commit: str, local: Path | None = None) -> None:
        self._url, self._commit, self._local = url, commit, local
        self._fetched: tempfile.TemporaryDirectory[str] | None = None

    def read(self, path: str) -> str:
        """The text of a file.

        Raises:
            NotFetched: there is no repository, or it has no such file.
        """
        return _git("-C", str(self._repository()), "show", f"{self._commit}:{path}")

    def _repository(self) -> Path:
        if self._local is not None:
            return self._local
        if self._fetched is None:
            folder = tempfile.TemporaryDirectory(prefix="programs_")
            _git("init", "--quiet", folder.name)
            _git("-C", folder.name, "fetch", "--quiet", "--depth=1", self._url, self._commit)
            self._fetched = folder
        return Path(self._fetched.name)


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise NotFetched(
            f"git {' '.join(arguments)}: {result.stderr.strip()}\n"
            "  try:  --source FOLDER with a clone of the repository"
        )
    return result.stdout

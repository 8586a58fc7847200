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

    def copy(self, path: str, into: Path) -> None:
        """Write a folder, with all that is in it, as `into`.

        Raises:
            NotFetched: there is no repository, or it has no such folder.
        """
        repository = "-C", str(self._folder())
        listed = _git(*repository, "ls-tree", "-r", "-z", self._repository.commit, path or ".")
        for entry in filter(None, listed.split("\0")):
            kind, _, name = entry.partition("\t")
            mode, _, blob = kind.split()
            if mode not in ("100644", "100755"):
                continue  # links, and other repositories
            content = subprocess.run(
                ["git", *repository, "cat-file", "blob", blob], capture_output=True, check=False
            )
            if content.returncode:
                continue  # mirrors lack large files
            file = into / Path(name).relative_to(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.stdout)
        if not into.is_dir():
            raise NotFetched(f"{self._repository.name} has no folder {path}")

    def _folder(self) -> Path:
        if self._local is not None:
            return self._local
        if self._fetched is None:
            folder = tempfile.TemporaryDirectory(prefix="programs_")
            _git("init", "--quiet", folder.name)
            wanted = self._repository.url, self._repository.commit
            _git("-C", folder.name, "fetch", "--quiet", "--depth=1", *wanted)
            _git("-C", folder.name, "update-ref", "HEAD", "FETCH_HEAD")
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

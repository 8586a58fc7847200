"""Keep compiled stages in a folder of the user's own, for later processes.

A stage's code is Inductor's artifact, a pickle, and shared libraries: who can write them can run
code as the user. Therefore the folder and those in it are made with mode 0700, and one that belongs
to somebody else, or that others can write to, is refused.
"""

import json
import logging
import os
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from ipu_dynamo.errors import IpuError
from ipu_dynamo.rank_number import this_rank
from ipu_dynamo.tune.scratch_folders import remove_abandoned, scratch_folder

log = logging.getLogger(__name__)
CACHE_DIR = "IPU_DYNAMO_CACHE_DIR"  # environment variable: the folder, or OFF
OFF = "off"
_UNFINISHED = ".unfinished-"
_DAMAGES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    NotImplementedError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class StageArtifact:
    """The compiled code of one stage.

    Args:
        code: what `load_artifact` takes.
        kernels: the shared library of each kernel and its name there, by the digest of the
            kernel's source.
    """

    code: bytes
    kernels: Mapping[str, tuple[Path, str]]


class StageStore:
    """Entries by key in `folder`.

    Invariant: every file there is whole, and of the user's own making; concurrent processes may
    write the same entry, and one of them stays.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stages, self._kernels = folder / "stages", folder / "kernels"
        self._building, self._checks = folder / "building", folder / "checks"
        folders = (self._stages, self._kernels, self.scratch, self._building, self._checks)
        for private in (folder, *folders):
            make_private(private)

    @property
    def scratch(self) -> Path:
        """Where Inductor may keep its own files."""
        return self.folder / "inductor"

    def building(self) -> AbstractContextManager[Path]:
        """A folder to compile in, for a block."""
        return scratch_folder(self._building)

    def remove_abandoned(self) -> None:
        """Remove unfinished files of killed processes."""
        with suppress(OSError):  # files that cannot be removed do no harm
            remove_abandoned(self._building)
            for folder in (self._stages, self._kernels, self._checks):
                _sweep_unfinished(folder)

    def read(self, key: str) -> StageArtifact | None:
        """The entry, or None when there is none, or a damaged one."""
        path = self._stages / key
        try:
            with zipfile.ZipFile(path) as file:
                origins = json.loads(file.read("kernels.json"))
                code = file.read("code")  # with its checksum
            libraries = {digest: self._intact(digest) for digest, _ in origins.values()}
            kernels = {
                source: (libraries[digest], str(name)) for source, (digest, name) in origins.items()
            }
        except FileNotFoundError as error:
            if error.filename != str(path):
                log.warning("%s lacks %s: the stage is compiled again", path, error.filename)
            return None
        except _DAMAGES as error:
            log.warning("%s is damaged (%s): the stage is compiled again", path, error)
            return None
        return StageArtifact(code, kernels)

    def has(self, key: str) -> bool:
        """Whether there is an entry, which may be damaged."""
        return (self._stages / key).is_file()

    def write(self, key: str, entry: StageArtifact) -> None:
        """Keep an entry, in place of one with this key; its kernels are copied."""
        paths = dict.fromkeys(library for library, _ in entry.kernels.values())
        digests = {library: self.keep_library(library).stem for library in paths}
        origins = {
            source: (digests[library], name) for source, (library, name) in entry.kernels.items()
        }
        with tempfile.SpooledTemporaryFile() as whole:
            with zipfile.ZipFile(whole, "w") as file:
                file.writestr("kernels.json", json.dumps(origins))
                file.writestr("code", entry.code)
            whole.seek(0)
            replace_file(self._stages / key, whole.read())

    def read_outcome(self, key: str) -> str:
        """The outcome of the check of a stage; empty if it is not known, or damaged."""
        path = self._checks / key
        try:
            return unsealed(path.read_bytes())
        except FileNotFoundError:
            return ""
        except _DAMAGES as error:
            log.warning("%s is damaged (%s): the stage is checked again", path, error)
            return ""

    def write_outcome(self, key: str, outcome: str) -> None:
        """Keep the outcome of the check of a stage."""
        replace_file(self._checks / key, sealed(outcome))

    def keep_library(self, library: Path) -> Path:
        """Copy a shared library here, under the digest of its content; gives its place."""
        if library.parent == self._kernels and library.exists():
            return library
        content = library.read_bytes()
        path = self._library(sha256(content).hexdigest())
        replace_file(path, content)
        return path

    def _intact(self, digest: str) -> Path:
        """The library with this digest.

        Raises:
            ValueError: its content is another. (Loading such a file may end the process.)
        """
        path = self._library(digest)
        if sha256(path.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{path.name} has changed")
        return path

    def _library(self, digest: str) -> Path:
        return self._kernels / f"{digest}.so"


def sealed(text: str) -> bytes:
    """The content of a file with `text` and its checksum."""
    return f"{text}\n{sha256(text.encode()).hexdigest()}\n".encode()


def unsealed(content: bytes) -> str:
    """The text in a sealed file.

    Raises:
        ValueError: it is not as it was written.
    """
    text, _, digest = content.decode().rstrip("\n").rpartition("\n")
    if sha256(text.encode()).hexdigest() != digest:
        raise ValueError("its checksum differs")
    return text


def open_store() -> StageStore | None:
    """The store that the environment names; None when it is switched off or cannot be had.

    Raises:
        IpuError: the folder that the user named is not safe, or cannot be made.
    """
    named = os.environ.get(CACHE_DIR)
    if named == OFF:
        return None
    try:
        return StageStore(Path(named).absolute() if named else _default())
    except OSError as error:
        problem = f"compiled stages cannot be kept: {error}"
    except UnsafeFolder as error:
        problem = str(error)
    if named:
        raise IpuError(f"{problem}\n  try:  set {CACHE_DIR} to another folder, or to {OFF}")
    _warn_once(problem)
    return None


class UnsafeFolder(Exception):
    """Another user could have put code into a folder."""


def _default() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ipu_dynamo"


def make_private(folder: Path) -> None:
    """Make a folder that no other user can write to, unless it exists.

    Raises:
        UnsafeFolder: the existing one belongs to another user, or others can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return  # Windows: the folder inherits the access list of the user's profile
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise UnsafeFolder(
            f"compiled stages are not taken from {folder}, which belongs to user {status.st_uid}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeFolder(
            f"compiled stages are not taken from {folder}, which others can write to "
            f"(mode {stat.S_IMODE(status.st_mode):04o}, it should be 0700)"
        )


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that no process ever sees unfinished."""
    with _unfinished(path, content) as name:
        os.replace(name, path)


def keep_first(path: Path, content: bytes) -> None:
    """Write a file in the same way, unless there is one: of several processes, one succeeds."""
    with _unfinished(path, content) as name, suppress(FileExistsError):
        os.link(name, path)


def _sweep_unfinished(folder: Path) -> None:
    """Remove files of killed writers: those older than a minute, as a write takes less."""
    for file in folder.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > 60:
                file.unlink()


@contextmanager
def _unfinished(path: Path, content: bytes) -> Iterator[str]:
    """The name of a new file next to `path`; deleted after the block if it still exists."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


@cache
def _warn_once(problem: str) -> None:
    if this_rank() == 0:
        log.warning("%s", problem)

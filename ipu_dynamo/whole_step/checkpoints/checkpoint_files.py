"""Write a checkpoint as a folder of files, and read it back: complete and unchanged, or not at all.

`rank-0000-of-0001.safetensors` has the tensors. `model.safetensors.index.json` lists those of the
model, in the form of Hugging Face's loaders. `checkpoint.json` has numbers and texts, and the size
and checksum of each file. Each rank of a mesh writes a file of tensors.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipu_dynamo.replace_file import adding_folder, replacing
from ipu_dynamo.saved.checked_reader import FileReader, opened
from ipu_dynamo.saved.json_text import expect, fields_of, read_json, write_json
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.tensors import TensorMember, tensors_of
from ipu_dynamo.version import __version__

Folder = str | os.PathLike[str]
FORMAT, FORM = "ipu_dynamo checkpoint", 1
LATEST, HEAD, INDEX = "latest", "checkpoint.json", "model.safetensors.index.json"
MOST_BYTES = 1 << 26  # of a file of JSON
_NAME = re.compile(r"checkpoint-(\d{6,18})", re.ASCII)
_FILE = re.compile(r"rank-\d{4,9}-of-\d{4,9}\.safetensors", re.ASCII)
_METADATA = {"format": "pt"}  # which some of Hugging Face's loaders ask for
_UNKNOWN = "0" * 64  # the head's checksum, in the text that it is of


@dataclass(frozen=True, slots=True)
class CheckpointHead:
    """All of a checkpoint but its tensors.

    Args:
        replicas: how many there were.
        random_state: where random numbers go on: the seed, and the steps since it was set.
        rules: the update of each trained parameter, by its name.
        states: the names of the tensors that are states; the others are the model's.
        program: a digest, for readers.
        extra: of the user, as JSON has it.
    """

    replicas: int
    random_state: tuple[int, int]
    rules: Mapping[str, str]
    states: tuple[str, ...]
    program: str
    extra: Any


class CheckpointFile(NamedTuple):
    """A file of a checkpoint, its bytes, and their checksum."""

    name: str
    size: int
    sha256: str


@contextmanager
def adding_checkpoint(folder: Folder) -> Iterator[tuple[Path, Path]]:
    """A folder for the files of a new checkpoint, and the name that it gets.

    When the block ends without an error, the checkpoint is complete, and the latest in `folder`.

    Raises:
        OSError: it cannot be written; the latest one stays as it is.
    """
    outer = Path(folder)
    outer.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in outer.iterdir() if (match := _NAME.fullmatch(path.name))]
    path = outer / f"checkpoint-{max(numbers, default=0) + 1:06}"
    with adding_folder(path) as inner:
        yield inner, path
    with replacing(outer / LATEST) as file:
        file.write(f"{path.name}\n".encode("ascii"))


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], rank: int, ranks: int
) -> CheckpointFile:
    """Write the tensors of a rank.

    Raises:
        SavedProgramError: a dtype does not fit into files.
    """
    name = f"rank-{rank:04}-of-{ranks:04}.safetensors"
    return _write(folder / name, TensorMember(tensors, _METADATA).pieces())


def write_head(
    folder: Path,
    head: CheckpointHead,
    files: Sequence[CheckpointFile],
    weights: Mapping[str, tuple[int, int]],
) -> None:
    """Write all of a checkpoint but its tensors.

    Args:
        files: of tensors, by ranks.
        weights: for each name in the model's state, the rank that wrote it, and its bytes.

    Raises:
        SavedProgramError: a text is too long.
    """
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in weights.values())},
        "weight_map": {name: files[rank].name for name, (rank, _) in weights.items()},
    }
    written = _write(folder / INDEX, [_json(index, INDEX)])
    _write(folder / HEAD, [_json(_with_checksum(head, [*files, written]), HEAD)])


def latest_checkpoint(folder: Folder) -> Path | None:
    """The checkpoint that `ipu_dynamo.save_checkpoint` completed last in a folder; None: none.

    Args:
        folder: the folder that `save_checkpoint` was given.

    Raises:
        SavedProgramError: the file `latest` names none.
    """
    path = Path(folder) / LATEST
    if not path.exists():
        return None
    with opened(os.fspath(path)) as file:
        text = file.read(100)
    name = text.removesuffix(b"\n").decode("ascii", "replace")
    if not _NAME.fullmatch(name):
        raise SavedProgramError(Reason.DAMAGED, f"it names no checkpoint: {name!r}", path=path)
    return path.parent / name


def read_checkpoint(path: Path) -> tuple[CheckpointHead, dict[str, Tensor]]:
    """Read all of a checkpoint, and compare it with its sizes and checksums.

    Raises:
        SavedProgramError: a file is missing, or is not as it was written.
    """
    at = path / HEAD
    with opened(os.fspath(at)) as file:
        content = file.read(MOST_BYTES + 1)
    try:
        if len(content) > MOST_BYTES:
            raise SavedProgramError(Reason.LIMIT, f"it has more than {MOST_BYTES} bytes")
        head, files = _read_head(content)
    except SavedProgramError as error:
        error.path = os.fspath(at)
        raise
    tensors: dict[str, Tensor] = {}
    for entry in files:
        reader = FileReader(path / entry.name, entry.size, entry.sha256)
        if entry.name == INDEX:  # which is for other readers
            with reader as reading:
                reading.into(memoryview(bytearray(entry.size)))
            continue
        try:
            found = tensors_of(reader, _METADATA)
        except SavedProgramError as error:
            error.path = os.fspath(path / entry.name)
            raise
        if twice := tensors.keys() & found.keys():
            raise reader.refused(Reason.CONTENT, f"{min(twice)} is in another file, too")
        tensors |= found
    if missing := set(head.states) - tensors.keys():
        problem = f"there is no tensor of the state {min(missing)}"
        raise SavedProgramError(Reason.CONTENT, problem, path=at)
    return head, tensors


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> CheckpointFile:
    """Write a new file, and wait until it is on the disk."""
    digest, size = sha256(), 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return CheckpointFile(path.name, size, digest.hexdigest())


def _json(value: Any, name: str) -> bytes:
    content = write_json(value)
    if len(content) > MOST_BYTES:
        problem = f"it has {len(content)} bytes of JSON, of at most {MOST_BYTES}"
        raise SavedProgramError(Reason.CANNOT_SAVE, problem, part=name)
    return content


def _with_checksum(head: CheckpointHead, files: Iterable[CheckpointFile]) -> dict[str, Any]:
    """The head as JSON, with a checksum of itself."""
    seed, step = head.random_state
    value = {
        "format": FORMAT,
        "form": FORM,
        "ipu_dynamo": __version__,
        "torch": torch.__version__,
        "files": [entry._asdict() for entry in files],
        "replicas": head.replicas,
        "random_state": {"seed": seed, "step": step},
        "rules": dict(head.rules),
        "states": list(head.states),
        "program": head.program,
        "extra": head.extra,
        "sha256": _UNKNOWN,
    }
    return value | {"sha256": sha256(write_json(value)).hexdigest()}


def _read_head(content: bytes) -> tuple[CheckpointHead, list[CheckpointFile]]:
    value = expect(read_json(content), dict, "the checkpoint")
    if value.get("format") != FORMAT:
        raise SavedProgramError(Reason.FOREIGN, "it is no list of a checkpoint")
    if value.get("form") != FORM:
        problem = f"it has form {value.get('form')!r}, and this version reads {FORM}"
        raise SavedProgramError(Reason.FORM, problem)
    if value.get("sha256") != sha256(write_json(value | {"sha256": _UNKNOWN})).hexdigest():
        raise SavedProgramError(Reason.DAMAGED, "its checksum differs")
    _, _, _, _, files, replicas, random_state, rules, states, program, extra, _ = fields_of(
        value, "the checkpoint", format=str, form=int, ipu_dynamo=str, torch=str, files=list,
        replicas=int, random_state=dict, rules=dict, states=list, program=str, extra=_ANY,
        sha256=str,
    )  # fmt: skip
    seed, step = fields_of(random_state, "random_state", seed=int, step=int)
    if not (-(1 << 63) <= seed < 1 << 64 and 0 <= step < 1 << 62 and replicas > 0):
        raise SavedProgramError(Reason.CONTENT, "its random state or its replicas cannot be")
    for text in (*rules.values(), *states):
        expect(text, str, "a rule or a state")
    listed = [_file(entry) for entry in files]
    if len({entry.name for entry in listed}) != len(listed):
        raise SavedProgramError(Reason.CONTENT, "it lists a file twice")
    return CheckpointHead(replicas, (seed, step), rules, tuple(states), program, extra), listed


_ANY = (dict, list, str, int, float, bool, type(None))


def _file(value: Any) -> CheckpointFile:
    name, size, digest = fields_of(value, "a file", name=str, size=int, sha256=str)
    largest = MOST_BYTES if name == INDEX else 1 << 62
    if not (name == INDEX or _FILE.fullmatch(name)) or not 0 <= size < largest:
        raise SavedProgramError(Reason.CONTENT, f"not a file of a checkpoint: {name!r}")
    return CheckpointFile(name, size, digest)

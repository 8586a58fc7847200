"""Save executors, and bring them up again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved.archive import Archive, write_archive
from ipu_dynamo.saved.json_text import expect, fields_of, write_json
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.tensors import TensorMember, read_tensors
from ipu_dynamo.saved.values import read_value, write_value
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.saving.load import Opened, entry_names, open_entry
from ipu_dynamo.whole_step.saving.save import ONLY, contents
from poptorch._distribution import __version__
from poptorch._logging import logger
from poptorch.arguments import CallArguments
from poptorch.errors import require
from poptorch.options import Options
from poptorch.saving.options_json import read_options, write_options
from poptorch.saving.trust import pickled, sign, unpickled

KIND = "poptorch"
_DEFAULT_NAME = "model.poptorch"
_CALL, _TENSORS = "poptorch/call.json", "poptorch/inputs.safetensors"
_OPTIONS, _MODULE = "poptorch/options.json", "poptorch/module"
_MOST = 1 << 26  # bytes of JSON
_HEAD = {"poptorch": str, "training": bool, "exported": bool, "signature": str}


@dataclass(frozen=True)
class Exported:
    """The parts of a file that are of the model itself.

    Args:
        model, optimizer: as they were pickled; None for inference.
    """

    model: Any
    optimizer: torch.optim.Optimizer | None
    training: bool
    options: Options


def target(filename: str) -> Path:
    """The file to write, in a folder that exists.

    Raises:
        AssertionError: a part of its path is a file.
    """
    path = Path(filename)
    if path.is_dir():
        path = path / _DEFAULT_NAME
        logger.warning("%s is a folder: saving to %s", filename, path)
    for parent in path.parents:
        require(not parent.exists() or parent.is_dir(), f"{parent} is not a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(
    path: Path,
    core: CompiledModel,
    call: CallArguments,
    options: Options,
    *,
    training: bool,
    random_state: bool,
    exported: tuple[Any, Any] | None,
) -> None:
    """Write a compiled model, with the call that it was compiled for.

    Args:
        exported: model and optimizer, if they are to be in the file.

    Raises:
        SavedProgramError: it cannot be saved.
    """
    members, head = contents(core, random_state=random_state)
    tensors = {f"{i}": x for i, (_, x) in enumerate(call.leaves()) if isinstance(x, Tensor)}
    members[_CALL] = write_json(_write_call(call))
    members[_TENSORS] = TensorMember({n: x.detach().contiguous() for n, x in tensors.items()})
    members[_OPTIONS] = write_json(write_options(options))
    if exported is not None:
        members[_MODULE] = pickled(exported)
    head |= {"kind": KIND, "poptorch": __version__, "training": training,
             "exported": exported is not None}  # fmt: skip
    write_archive(path, members, head, sign)


def _write_call(call: CallArguments) -> dict[str, Any]:
    return {
        "values": [
            [name, write_value(one, f"argument {name}")] for name, one in call.values.items()
        ],
        "positional": call.positional,
        "names": list(call.names),
    }


def check_version(archive: Archive) -> str | None:
    """Why this package cannot read a file; None if it can.

    Raises:
        SavedProgramError: its head is not valid.
    """
    names = entry_names(archive, KIND, **_HEAD)
    if names != [ONLY]:
        raise archive.refused(Reason.CONTENT, f"it has the entry points {names}")
    if (found := archive.head["poptorch"]) != __version__:
        return f"PopTorch version mismatch: {found} wrote it, and this is {__version__}"
    return None


def read_call(archive: Archive) -> CallArguments:
    """The call that a program was compiled for.

    Raises:
        SavedProgramError: it is not as it was written.
    """
    written = archive.read_json(_CALL, _MOST)
    tensors = read_tensors(archive, _TENSORS)
    with archive.part(_CALL):
        pairs, positional, names = fields_of(
            written, "the call", values=list, positional=int, names=list
        )
        order = iter(sorted(tensors, key=_number))

        def tensor(dtype: torch.dtype) -> Tensor:
            found = tensors.get(next(order, ""))
            if found is None or found.dtype != dtype:
                raise SavedProgramError(Reason.CONTENT, "the call has other tensors")
            return found

        values = {}
        for pair in pairs:
            name, one = expect(pair, list, "an argument") if len(pair) == 2 else (None, None)
            values[expect(name, str, "an argument")] = read_value(one, tensor)
        for name in names:
            expect(name, str, "a parameter")
    return CallArguments(values, positional, tuple(names))


def _number(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise SavedProgramError(Reason.CONTENT, "the call has other tensors")
    return int(name)


def read_exported(archive: Archive, edit: Callable[[Options], Any] | None) -> Exported:
    """The model in a file, with options that `edit` may change.

    Raises:
        SavedProgramError: the file is not as it was written.
        poptorch.Error: it is another user's.
    """
    written = archive.read_json(_OPTIONS, _MOST)
    with archive.part(_OPTIONS):
        options = read_options(written)
    model, optimizer = unpickled(archive.read(_MODULE, archive.size(_MODULE)), archive)
    if edit is not None:
        edit(options)
    return Exported(model, optimizer, archive.head["training"], options)


def opened(archive: Archive) -> Opened:
    """The program in a file."""
    return open_entry(archive, ONLY)


def metadata(filename: str) -> bytes:
    """The head of a file as JSON."""
    with Archive(filename) as archive:
        check_version(archive)
        return json.dumps(archive.head, indent=1, sort_keys=True).encode()

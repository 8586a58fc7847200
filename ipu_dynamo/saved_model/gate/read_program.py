"""Read a `.pt2` file: bytes, members, tensors, program, each checked before the next."""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ipu_dynamo.saved_model.files.json_values import parse_json
from ipu_dynamo.saved_model.gate.refusal import Refusal, damaged
from ipu_dynamo.saved_model.gate.zip_members import in_one_folder, read_members
from ipu_dynamo.saved_model.private.loaded_program import (
    build_program,
    sample_inputs,
    tensor_of,
)
from ipu_dynamo.saved_model.private.program_schema import read_payload, read_schema

_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_KINDS = {
    "data/weights/": ("model_weights_config.json", re.compile(r"weight_[0-9]{1,9}")),
    "data/constants/": ("model_constants_config.json", re.compile(r"tensor_[0-9]{1,9}")),
}
_FIXED = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little"}


def read_program(content: memoryview) -> ExportedProgram:
    """The program in the bytes of a `.pt2` file; its tensors are views of them.

    Args:
        content: may be written, for programs that write their buffers do so.

    Raises:
        Refusal: it is damaged, or more than data. Nothing of it was run.
    """
    members = in_one_folder(read_members(content))
    _check_members(members)
    tables = {folder: _tensors(members, folder, *kinds) for folder, kinds in _KINDS.items()}
    state, constants = tables["data/weights/"], tables["data/constants/"]
    examples = None
    if len(members.get(_SAMPLES, b"")):
        with _about(_SAMPLES):
            read_members(members[_SAMPLES])
            examples = sample_inputs(members[_SAMPLES])
    with _about(_PROGRAM):
        return build_program(read_schema(_json(members[_PROGRAM])), state, constants, examples)


def _check_members(members: Mapping[str, memoryview]) -> None:
    for name in (*_FIXED, _PROGRAM):
        if name not in members:
            raise Refusal(f"there is no member {name!r}; save it again with torch 2.8 or newer")
    for name, expected in _FIXED.items():
        if bytes(members[name][:40]).strip() != expected:
            raise Refusal(f"{name}: {bytes(members[name][:40])!r}, not {expected!r}")
    for name in members:
        if not _is_known(name):
            raise Refusal(f"{name}: no member that a program has")


def _is_known(name: str) -> bool:
    if name in (*_FIXED, _PROGRAM, _SAMPLES, "version") or name.startswith((".", "extra/")):
        return True
    for folder, (config, numbered) in _KINDS.items():
        rest = name.removeprefix(folder)
        if rest != name:
            return rest == config or bool(numbered.fullmatch(rest))
    return False


class _about:  # noqa: N801  reads as a word of the statement
    """Says of refusals within a `with` which member they are about."""

    def __init__(self, member: str) -> None:
        self._member = member

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if isinstance(error, Refusal):
            raise error.of(self._member) from error


def _json(content: memoryview) -> Any:
    try:
        return parse_json(bytes(content).decode("utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise damaged(f"no JSON ({error})") from error


def _tensors(
    members: Mapping[str, memoryview],
    folder: str,
    config: str,
    numbered: re.Pattern[str],
) -> dict[str, Tensor]:
    """The tensors that a list names; those of one member share its bytes."""
    name = folder + config
    if name not in members:
        raise Refusal(f"there is no member {name!r}; save it again with torch 2.8 or newer")
    storages: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    with _about(name):
        for qualified, payload in read_payload(_json(members[name])).config.items():
            path, meta = payload.path_name, payload.tensor_meta
            if payload.use_pickle or not numbered.fullmatch(path) or meta is None:
                raise Refusal(f"{qualified[:80]!r} is pickled, or an object ({path[:40]!r})")
            if folder + path not in members:
                raise damaged(f"{qualified[:80]!r} lies in {path}, which is not there")
            if path not in storages:
                storages[path] = _storage(members[folder + path])
            tensor = tensor_of(meta, storages[path])
            if payload.is_param:
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            tensors[qualified] = tensor
    return tensors


def _storage(member: memoryview) -> Tensor:
    """The bytes of a member, without a copy where they are aligned."""
    if not len(member):
        return torch.empty(0, dtype=torch.uint8)
    storage = torch.frombuffer(member, dtype=torch.uint8)
    return storage.clone() if storage.data_ptr() % 64 else storage


def read_bytes(path: str | os.PathLike[str]) -> memoryview:
    """The bytes of a file, read once, where tensors may lie that are aligned in the file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content: memoryview = torch.empty(size, dtype=torch.uint8).numpy().data
            size = file.readinto(content)
            if size != len(content) or file.read(1):
                raise ValueError(f"{os.fspath(path)} changed while it was read")
            return content
    except OSError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error

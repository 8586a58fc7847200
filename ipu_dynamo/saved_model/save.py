"""Save modules and exported programs as a saved program directory."""

import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from ipu_dynamo.saved_model.exported.export_module import export_module
from ipu_dynamo.saved_model.exported.program_file import program_bytes, program_of_bytes
from ipu_dynamo.saved_model.exported.program_interface import interface_of
from ipu_dynamo.saved_model.files.index import (
    FILE,
    MetaGraph,
    SignatureEntry,
    check_text,
    write_index,
)
from ipu_dynamo.saved_model.files.new_folder import new_folder


def save(
    dir: str | os.PathLike[str],
    signatures: Mapping[str, Any],
    *,
    tags: Iterable[str] = ("serve",),
    overwrite: bool = False,
    trust: bool = False,
) -> None:
    """Write a saved program directory of one meta graph, as a whole or not at all.

    Args:
        signatures: an `ExportedProgram` for each key, or `(module, args)`, `(module, args,
            dynamic_shapes)` or `(module, args, kwargs, dynamic_shapes)`, with what
            `torch.export.export` takes. Modules are exported as they are: in train or eval.
        overwrite: whether a directory that is there and not empty is replaced.
        trust: whether programs may hold what `load` refuses without it.

    Raises:
        FileExistsError: `dir` is there and not empty.
        ValueError: a result is no tensor, two tensors have one name, or `load` would refuse.
    """
    if isinstance(tags, str):
        raise TypeError("tags are a list of texts, not a text")
    names = frozenset(check_text(tag, "tags") for tag in tags)
    if not signatures:
        raise ValueError("there is no signature to save")
    folder = program_folder(names)
    entries: dict[str, SignatureEntry] = {}
    with new_folder(Path(dir), overwrite=overwrite) as target:
        for key, value in signatures.items():
            path = f"{folder}/{file_name(check_text(key, 'signatures'))}.pt2"
            program = _program(key, value)
            content = program_bytes(program)
            # the reader's opinion of it, before anybody relies on the file
            again = program_of_bytes(
                memoryview(bytearray(content)), f"signature {key!r}", trust=trust
            )
            interface = interface_of(again)
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
            digest = sha256(content).hexdigest()
            entries[key] = SignatureEntry(path, digest, interface.inputs, interface.outputs)
        (target / FILE).write_bytes(write_index([MetaGraph(names, entries)]))


def _program(key: str, value: Any) -> ExportedProgram:
    match value:
        case ExportedProgram():
            return value
        case (nn.Module() as module, tuple() as args):
            return export_module(module, args)
        case (nn.Module() as module, tuple() as args, shapes):
            return export_module(module, args, None, shapes)
        case (nn.Module() as module, tuple() as args, kwargs, shapes):
            return export_module(module, args, kwargs, shapes)
    raise TypeError(
        f"signature {key!r} is a {type(value).__name__}, not an ExportedProgram or (module, args), "
        "(module, args, dynamic_shapes) or (module, args, kwargs, dynamic_shapes)"
    )


def program_folder(tags: Iterable[str]) -> str:
    """Where the programs of a tag set are in a saved program directory."""
    return "programs/" + ("+".join(sorted(map(file_name, tags))) or "+")


def file_name(name: str) -> str:
    """A name without what paths are made of."""
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
    return plain if plain.strip(".") else f"_{plain}"

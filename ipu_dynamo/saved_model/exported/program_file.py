"""Write an exported program into bytes, and read one from a file through the gate."""

import io
import os
from hashlib import sha256

import torch
from torch.export import ExportedProgram

from ipu_dynamo.saved_model.exported.inline_graphs import inline_graphs
from ipu_dynamo.saved_model.exported.node_names import name_calls
from ipu_dynamo.saved_model.gate.read_program import read_bytes, read_program
from ipu_dynamo.saved_model.gate.refusal import Refusal

TRUST = "IPU_DYNAMO_TRUST"


def is_trusted(trust: bool) -> bool:
    """Whether the user has said so, here or by the environment."""
    return trust or os.environ.get(TRUST) == "1"


def program_bytes(program: ExportedProgram) -> bytes:
    """A program as a `.pt2` file, with the names of its nodes."""
    inline_graphs(program)
    name_calls(program)
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def load_program(
    path: str | os.PathLike[str], *, digest: str | None = None, trust: bool = False
) -> ExportedProgram:
    """The program in a file, read once, with named nodes.

    Args:
        digest: the SHA-256 that the file has to have; None if it is not known.
        trust: whether PyTorch may read the file without the gate: it may then run code in it.

    Raises:
        ValueError: it cannot be read, is damaged, or is more than data.
    """
    content = read_bytes(path)
    if digest is not None and sha256(content).hexdigest() != digest:
        raise ValueError(f"{os.fspath(path)}: damaged: its SHA-256 is not that of the index")
    return program_of_bytes(content, os.fspath(path), trust=trust)


def program_of_bytes(content: memoryview, source: str, *, trust: bool = False) -> ExportedProgram:
    """The same for bytes in memory; errors name `source`."""
    try:
        if is_trusted(trust):
            program = torch.export.load(io.BytesIO(content))
        else:
            program = read_program(content)
        inline_graphs(program)
    except Refusal as error:
        raise error.of(source) from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    name_calls(program)
    return program

"""Find an executable by its checksum, bring it up on this machine, and run it on rows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved.archive import Archive
from ipu_dynamo.saved.json_text import expect, fields_of
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved_model.conversion.executable.executable_file import (
    DESCRIPTION,
    FORMAT,
    FORMAT_VERSION,
    KIND,
    NODES,
    file_sum,
)
from ipu_dynamo.saved_model.files.json_values import parse_json
from ipu_dynamo.whole_step.saving.load import entry_names, read_models
from ipu_dynamo.whole_step.saving.loaded_model import LoadedModel

_LARGEST_DESCRIPTION = 1 << 26
_LARGEST_LIST = 1 << 28
_AGAIN = "convert the program again"


@dataclass(frozen=True, slots=True)
class Contents:
    """The data of a file in addition to its program.

    Attributes:
        rows: a call has any number of rows; else it is one micro-batch.
        stacked: micro-batches have a dimension more in front.
        nodes: that were compiled, as `show --nodes` lists nodes.
    """

    rows: bool
    stacked: bool
    nodes: list[dict[str, Any]]


class Executable:
    """A program in a file, ready to run.

    Args:
        path: of the file.
        digest: the checksum that it has to have.

    Raises:
        RuntimeError: it is missing, another one, or of a newer format, or this version cannot
            run it.
    """

    def __init__(self, path: Path, digest: str) -> None:
        check_file(path, digest)
        try:
            with Archive(path) as archive:
                self._contents = _contents(archive)
                (name,) = entry_names(archive, KIND)
                self._model: LoadedModel = read_models(archive, [name], engine="auto")[name]
        except (SavedProgramError, ValueError, OSError) as error:
            raise _refused(path, error) from error
        program, batching = self._model.program, self._model.executable.batching
        self._count = batching.splits
        self._rows = program.inputs[0].type.shape[0] if self._contents.rows else 1
        self._step = self._rows * self._count
        self._types = [entry.type.dtype for entry in program.inputs]
        self._once = [output.returns == "once" for output in program.outputs]
        self._plain = self._contents.rows and not any(self._once)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results of some rows, or of one micro-batch.

        Args:
            inputs: in the order of the program; rows that miss in the last step are zeros, whose
                results are dropped.

        Raises:
            ValueError: there is no row, or inputs have different numbers of rows.
        """
        full = self._plain
        for value, dtype in zip(inputs, self._types, strict=True):
            if value.dtype != dtype:
                raise TypeError(f"the executable takes {dtype}, not {value.dtype}")
            full = full and value.shape[0] == self._step
        if full:
            return list(self._model.run(inputs))  # one step: nothing to cut, fill up or join
        if self._contents.rows:
            return self._run_rows(inputs)
        if not self._contents.stacked:
            return list(self._model.run([value.contiguous() for value in inputs]))
        steps = [_padded(value.unsqueeze(0), self._count) for value in inputs]
        return [value[0].clone() for value in self._model.run(steps)]

    def close(self) -> None:
        """Free the memory."""
        del self._model

    def _run_rows(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        counts = {value.shape[0] for value in inputs}
        if len(counts) != 1 or not min(counts):
            raise ValueError(
                f"the inputs have {[value.shape[0] for value in inputs]} rows: give each the same "
                "number, at least one"
            )
        ((count,), step) = (counts, self._step)
        parts = []
        for first in range(0, count, step):
            rows = [_padded(value[first : first + step], step) for value in inputs]
            results = self._model.run(rows)
            parts.append(
                [
                    torch.cat([value] * self._count) if once else value
                    for value, once in zip(results, self._once, strict=True)
                ]
            )
        if len(parts) == 1:
            return [value if step == count else value[:count].clone() for value in parts[0]]
        return [torch.cat(values)[:count].clone() for values in zip(*parts, strict=True)]


def check_file(path: Path, digest: str) -> None:
    """Check a file's checksum, and that its description has a known format.

    Raises:
        RuntimeError: they do not fit.
    """
    if not path.is_file():
        raise RuntimeError(f"the executable {path} is missing: put it back, or {_AGAIN}")
    version = _format_version(path.with_suffix(DESCRIPTION))
    if version > FORMAT_VERSION:
        raise RuntimeError(
            f"the executable {path} has format version {version}, and this version reads up to "
            f"{FORMAT_VERSION}: {_AGAIN} with this version"
        )
    if (own := file_sum(path)) != digest:
        raise RuntimeError(
            f"the executable {path} has the SHA-256 {own}, and the program calls {digest}: put "
            f"that one back, or {_AGAIN}"
        )


def compiled_nodes(path: Path, digest: str) -> list[dict[str, Any]]:
    """The nodes that an executable was made of, as `show --nodes` lists nodes.

    Raises:
        RuntimeError: it is missing, another one, or damaged.
    """
    check_file(path, digest)
    try:
        with Archive(path) as archive:
            return _contents(archive).nodes
    except (SavedProgramError, OSError) as error:
        raise _refused(path, error) from error


def _format_version(path: Path) -> int:
    """Of the description beside an executable."""
    problem = f"the description {path} of the executable"
    try:
        if path.stat().st_size > _LARGEST_DESCRIPTION:
            raise RuntimeError(f"{problem} has more than {_LARGEST_DESCRIPTION} bytes")
        value = parse_json(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise RuntimeError(f"{problem} cannot be read ({error.strerror}): {_AGAIN}") from error
    except ValueError as error:
        raise RuntimeError(f"{problem} is damaged ({error}): {_AGAIN}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise RuntimeError(f"{problem} is none (its format is not {FORMAT!r}): {_AGAIN}")
    version = value.get("format_version")
    if type(version) is not int or version < 1:
        raise RuntimeError(f"{problem} has format version {version!r}: {_AGAIN}")
    return version


def _contents(archive: Archive) -> Contents:
    with archive.part(NODES):
        value = archive.read_json(NODES, _LARGEST_LIST)
        rows, stacked, nodes = fields_of(value, "nodes", rows=bool, stacked=bool, nodes=list)
        for node in nodes:
            for key, kind in _NODE.items():
                expect(expect(node, dict, "a node").get(key), kind, f"{key} of a node")
            if node.keys() != _NODE.keys():
                raise SavedProgramError(Reason.CONTENT, "a node has other fields")
    return Contents(rows, stacked, nodes)


_NODE: dict[str, Any] = {
    **dict.fromkeys(("name", "fx_name", "op", "kind", "dtype", "device"), str),
    "shape": list,
    "ipu": int,
    "stage": (int, type(None)),
}


def _refused(path: Path, error: Exception) -> RuntimeError:
    text = " ".join(str(error).split())
    shown = text if os.fspath(path) in text else f"{path}: {text}"
    return RuntimeError(f"the executable {shown}; {_AGAIN}")


def _padded(value: Tensor, rows: int) -> Tensor:
    """`value` with zeros for the rows that miss."""
    missing = rows - value.shape[0]
    if not missing:
        return value.contiguous()
    return torch.cat([value, value.new_zeros((missing, *value.shape[1:]))])

"""Write tensors as a safetensors member or file, and read them, a few megabytes at a time.

The library safetensors reads and writes whole files, or all bytes at once. That does not suit a
member of an archive with gigabytes of weights. The library reads files that are written here.
Source: the safetensors format, "Format", of huggingface/safetensors.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved.archive import Archive, MemberReader
from ipu_dynamo.saved.checked_reader import CheckedReader
from ipu_dynamo.saved.refusal import Reason, SavedProgramError

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LARGEST_HEADER = 1 << 26
_CHUNK = 1 << 22  # bytes that are copied at once, where they are not in the host's memory
_METADATA = "__metadata__"
_LENGTH = 8  # bytes of the number that says how long the header is


class TensorMember:
    """Tensors as a member of an archive, or as a file. They must not change until it is written.

    Args:
        tensors: contiguous ones, by name.
        metadata: texts by name, for other readers.

    Raises:
        SavedProgramError: a dtype that safetensors does not have.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        for name, tensor in tensors.items():
            check_dtype(name, tensor.dtype)
        order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        self._tensors = {name: tensors[name].detach() for name in order}
        kinds = {name: (t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}
        self._header = _header(kinds, metadata)
        self.size = len(self._header) + sum(_nbytes(*kind) for kind in kinds.values())

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        for tensor in self._tensors.values():
            assert tensor.is_contiguous()
            flat = tensor.reshape(-1)
            step = max(1, _CHUNK // flat.dtype.itemsize)
            for begin in range(0, len(flat), step):
                yield _bytes_of(flat[begin : begin + step].cpu())


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise SavedProgramError for a dtype that cannot be saved."""
    if dtype not in _CODES:
        raise SavedProgramError(
            Reason.CANNOT_SAVE, f"safetensors has no {str(dtype).removeprefix('torch.')}", part=name
        )


def read_tensors(archive: Archive, name: str) -> dict[str, Tensor]:
    """The tensors of a member, each in memory of its own.

    Raises:
        SavedProgramError: the member is not as it was written.
    """
    with archive.part(name):
        return tensors_of(MemberReader(archive, name))


def tensors_of(
    reader: CheckedReader, metadata: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Read the tensors of a `TensorMember` with this metadata, each in its own memory.

    Raises:
        SavedProgramError: it is not as it was written.
    """
    with reader as reading:
        length = bytearray(_LENGTH)
        reading.into(memoryview(length))
        size = int.from_bytes(length, "little")
        if size > min(reading.left, _LARGEST_HEADER):
            raise SavedProgramError(Reason.LIMIT, f"its header has {size} bytes")
        header = bytearray(size)
        reading.into(memoryview(header))
        kinds = _kinds(bytes(header), () if metadata is None else (_METADATA,))
        if _header(kinds, metadata) != length + header:
            raise SavedProgramError(Reason.DAMAGED, "its header is not as this package writes it")
        if sum(_nbytes(*kind) for kind in kinds.values()) != reading.left:
            raise SavedProgramError(Reason.DAMAGED, "its header says another size than it has")
        tensors = {}
        for key, (dtype, shape) in kinds.items():
            tensors[key] = torch.empty(shape, dtype=dtype)
            reading.into(_bytes_of(tensors[key].reshape(-1)))
    for key, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
            raise SavedProgramError(Reason.CONTENT, f"{key} has truth values above 1")
    return tensors


def _header(
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    """The bytes before the values of tensors, padded so that these are aligned."""
    entries: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    position = 0
    for name, (dtype, shape) in kinds.items():
        end = position + _nbytes(dtype, shape)
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_LENGTH + len(text)) % 64)
    return len(text).to_bytes(_LENGTH, "little") + text


def _kinds(
    header: bytes, others: Collection[str]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor that a header lists; the rest of it is not looked at.

    Args:
        others: entries that are no tensors.
    """
    try:
        entries = json.loads(header.decode("ascii"))
        return {name: _kind(entry) for name, entry in entries.items() if name not in others}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SavedProgramError(Reason.DAMAGED, f"its header is no header: {error}") from error


def _kind(entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("not a shape")
    if prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 62 or len(shape) > 64:
        raise ValueError("too large for any machine")
    return dtype, tuple(shape)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return prod(shape) * dtype.itemsize


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)

"""Read the values of variables: a sorted table of names, and the bytes that it points to.

Every offset, size and sum of the table is checked; values are views of the mapped file.
Source: tensorflow/core/lib/io/format.cc and util/tensor_bundle; LevelDB's table format.
"""

import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.checksums import fast_crc, masked_crc
from ipu_dynamo.saved_model.tf_graphs.dtypes import STRING, torch_dtype
from ipu_dynamo.saved_model.tf_graphs.messages import parse_message
from ipu_dynamo.saved_model.tf_graphs.varints import read_varint

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_TRAILER = 5  # compression and sum of a block
_LARGEST_INDEX = 1 << 28


class VariableTable:
    """The table `<prefix>.index` with its data files.

    Attributes:
        names: all keys, sorted.

    Raises:
        ValueError: it is damaged.
        NotImplementedError: it is of a form that TensorFlow does not write here.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._path = prefix.with_name(f"{prefix.name}.index")
        if self._path.stat().st_size > _LARGEST_INDEX:
            raise ValueError(f"{self._path}: more than {_LARGEST_INDEX} bytes")
        self._content = self._path.read_bytes()
        self._entries = dict(self._read())
        header = parse_message("BundleHeader", self._entries.pop("", b""), str(self._path))
        if header.endianness:
            raise NotImplementedError(f"{self._path} is of a big-endian machine")
        self._shards = header.num_shards
        if not 0 < self._shards <= 100_000:
            raise self._damaged(0, f"{self._shards} data files")
        self._maps: dict[int, mmap.mmap | bytes] = {}
        self.names = sorted(self._entries)

    def tensor(self, name: str) -> Tensor:
        """The value of a variable, whose sum is checked.

        Raises:
            ValueError: the value, or its entry in the table, is damaged.
        """
        entry = self._entry(name)
        dtype = torch_dtype(entry.dtype, f"variable {name!r}")
        shape = [dim.size for dim in entry.shape.dim]
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != entry.size:
            problem = f"{name!r} has shape {shape} in {entry.size} bytes"
            raise ValueError(f"{self._path}: damaged: {problem}")
        data = self._bytes(name, entry)
        if fast_crc() is not None and masked_crc(data) != entry.crc32c:
            where = f"{self._shard(entry.shard_id)}: offset {entry.offset}"
            raise ValueError(f"{where}: damaged: the sum of {name!r}")
        if not entry.size:
            return torch.empty(shape, dtype=dtype)
        view = torch.frombuffer(data, dtype=torch.uint8)
        aligned = view if view.data_ptr() % dtype.itemsize == 0 else view.clone()
        return aligned.view(dtype).reshape(shape)

    def object_graph(self) -> Any:
        """The message that pairs names of variables with keys; None in TensorFlow 1's files."""
        if OBJECT_GRAPH not in self._entries:
            return None
        entry = self._entry(OBJECT_GRAPH)
        data = bytes(self._bytes(OBJECT_GRAPH, entry))
        where = f"{self._shard(entry.shard_id)}: offset {entry.offset}"
        if entry.dtype != STRING:
            raise ValueError(f"{where}: damaged: the graph of objects is no text")
        length, at = read_varint(data, 0, where)
        content = data[at + 4 : at + 4 + length]  # a sum of the lengths lies between
        if len(content) != length or at + 4 + length != len(data):
            raise ValueError(f"{where}: damaged: the graph of objects has not {length} bytes")
        lengths = length.to_bytes(4 if length < 1 << 32 else 8, "little")
        summed = lengths + data[at : at + 4] + content
        if masked_crc(lengths).to_bytes(4, "little") != data[at : at + 4]:
            raise ValueError(f"{where}: damaged: the lengths of the graph of objects")
        if masked_crc(summed) != entry.crc32c:
            raise ValueError(f"{where}: damaged: the graph of objects")
        return parse_message("ObjectGraph", content, where)

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            raise ValueError(f"{self._path} has no value {name!r}")
        entry = parse_message("BundleEntry", self._entries[name], str(self._path))
        if len(entry.slices):
            raise NotImplementedError(f"{self._path}: variable {name!r} is partitioned")
        if not 0 <= entry.shard_id < self._shards or entry.offset < 0 or entry.size < 0:
            raise ValueError(f"{self._path}: damaged: where {name!r} is")
        return entry

    def _shard(self, index: int) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.data-{index:05d}-of-{self._shards:05d}")

    def _bytes(self, name: str, entry: Any) -> memoryview:
        path = self._shard(entry.shard_id)
        if entry.shard_id not in self._maps:
            with path.open("rb") as file:
                empty = not os.fstat(file.fileno()).st_size
                mapped = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._maps[entry.shard_id] = mapped
        whole = memoryview(self._maps[entry.shard_id])
        end = entry.offset + entry.size
        if end > len(whole):
            raise ValueError(f"{path}: damaged: {name!r} ends at {end} of {len(whole)} bytes")
        return whole[entry.offset : end]

    def _damaged(self, offset: int, problem: str) -> ValueError:
        return ValueError(f"{self._path}: offset {offset}: damaged: {problem}")

    def _read(self) -> Iterator[tuple[str, bytes]]:
        """All keys and values, in order."""
        content = self._content
        if len(content) < _FOOTER or int.from_bytes(content[-8:], "little") != _MAGIC:
            raise self._damaged(max(len(content) - _FOOTER, 0), "no end of a table")
        footer = content[-_FOOTER:-8]
        where = str(self._path)
        at = 0
        numbers = []
        for _ in range(4):
            number, at = read_varint(footer, at, where)
            numbers.append(number)
        self._block(numbers[0], numbers[1])  # the meta-index, which is empty
        last = None
        for _, handle in self._pairs(numbers[2], numbers[3]):
            offset, at = read_varint(handle, 0, where)
            size, _ = read_varint(handle, at, where)
            for key, value in self._pairs(offset, size):
                if last is not None and key <= last:
                    raise self._damaged(offset, "keys are not sorted")
                last = key
                try:
                    yield key.decode("utf-8"), value
                except UnicodeDecodeError:
                    raise self._damaged(offset, "a key is no text") from None

    def _block(self, offset: int, size: int) -> bytes:
        end = offset + size + _TRAILER
        if end > len(self._content) - _FOOTER:
            raise self._damaged(offset, f"a block of {size} bytes ends behind the table")
        kind = self._content[offset + size]
        stored = int.from_bytes(self._content[end - 4 : end], "little")
        if masked_crc(memoryview(self._content)[offset : end - 4]) != stored:
            raise self._damaged(offset, "the sum of a block")
        if kind == 1:
            raise NotImplementedError(f"{self._path}: offset {offset}: packed with snappy")
        if kind:
            raise self._damaged(offset, f"packed in the way {kind}")
        return self._content[offset : offset + size]

    def _pairs(self, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
        """The keys and values of a block; a key is stored as its difference from the previous."""
        block, where = self._block(offset, size), str(self._path)
        restarts = int.from_bytes(block[-4:], "little")
        end = len(block) - 4 - 4 * restarts
        if end < 0:
            raise self._damaged(offset, f"{restarts} restarts of a block")
        at, key = 0, b""
        while at < end:
            shared, at = read_varint(block, at, where)
            own, at = read_varint(block, at, where)
            length, at = read_varint(block, at, where)
            if shared > len(key) or at + own + length > end:
                raise self._damaged(offset, "an entry of a block")
            key = key[:shared] + block[at : at + own]
            yield key, block[at + own : at + own + length]
            at += own + length

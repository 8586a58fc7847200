"""Pickle data sets and items with their tensors apart from all other parts.

A data set goes to a process that is being started, its tensors in a file that the process maps.
`torch.multiprocessing` would send a descriptor for each tensor, and a process has few descriptors.
It would also close those of temporary tensors, such as the state of a generator. The tensors of an
item are in a ring already, and its pickle only refers to them.
"""

import io
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ipu_dynamo.batches.anonymous_files import in_memory, on_disk

_MAPPED = 1 << 16  # bytes; smaller tensors are read: a process can have some 65,000 maps
_PROTOCOL = pickle.HIGHEST_PROTOCOL


def strip_tensors(item: Any, tensors: Sequence[Tensor]) -> bytes:
    """The skeleton of an item: all of its parts except `tensors`."""
    buffer = io.BytesIO()
    _ItemPickler(buffer, tensors).dump(item)
    return buffer.getvalue()


def insert_tensors(skeleton: bytes, tensors: Sequence[Tensor]) -> Any:
    """An item with this skeleton and other tensors."""
    return _ItemUnpickler(io.BytesIO(skeleton), tensors).load()


class DatasetTransfer:
    """A data set, in this process or, once pickled, in the process that is being started.

    Args:
        data: the data set.
        by_disk: whether the files are on the disk.
    """

    def __init__(self, data: Any, *, by_disk: bool) -> None:
        self._data, self._by_disk = data, by_disk
        self._files: list[int] = []

    def unpack(self) -> Any:
        """The data set. A transfer that was not pickled returns the object itself."""
        return self._data

    def __reduce__(self) -> tuple[Any, ...]:
        """Write the files; only while a process is being started, which gets their descriptors."""
        new = on_disk if self._by_disk else in_memory
        self._files += [new(), new()]
        stream, tensors = self._files[-2:]
        with (
            open(stream, "wb", closefd=False) as stream_file,
            open(tensors, "wb", closefd=False) as tensors_file,
        ):
            _DatasetPickler(stream_file, tensors_file).dump(self._data)
        return _ReceivedDataset, (reduction.DupFd(stream), reduction.DupFd(tensors))

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        for file in self._files:
            _close(file)  # bound above: the names of modules may be gone when the interpreter ends


class _ReceivedDataset:
    """A transfer in the process that was started."""

    def __init__(self, stream: Any, tensors: Any) -> None:
        self._stream, self._tensors = stream.detach(), tensors.detach()

    def unpack(self) -> Any:
        with open(self._stream, "rb") as stream, open(self._tensors, "rb") as tensors:
            stream.seek(0)  # its writer, who shares the position, is at the end
            return _DatasetUnpickler(stream, tensors.fileno()).load()


class _DatasetPickler(reduction.ForkingPickler):
    """Writes the bytes of tensors into a file of their own."""

    def __init__(self, stream: BinaryIO, tensors: BinaryIO) -> None:
        super().__init__(stream, _PROTOCOL)
        self._tensors = tensors
        self._offsets: dict[tuple[int, int], tuple[torch.UntypedStorage, int]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        if not _is_plain(obj):
            return obj.__reduce_ex__(_PROTOCOL)
        view = obj.storage_offset(), tuple(obj.shape), obj.stride()
        return _tensor, (obj.untyped_storage(), obj.dtype, *view, obj.requires_grad)

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        if not isinstance(obj, torch.UntypedStorage) or obj.device.type != "cpu":
            return None
        key = obj.data_ptr(), obj.nbytes()
        if key not in self._offsets:
            if obj.nbytes() >= _MAPPED:
                self._tensors.write(bytes(-self._tensors.tell() % mmap.ALLOCATIONGRANULARITY))
            # holds the storage, so that no other one gets its address
            self._offsets[key] = obj, self._tensors.tell()
            content = torch.empty(0, dtype=torch.uint8).set_(obj)
            self._tensors.write(content.numpy().data)
        return self._offsets[key][1], obj.nbytes()


class _DatasetUnpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, tensors: int) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def persistent_load(self, pid: tuple[int, int]) -> torch.UntypedStorage:
        if pid not in self._storages:
            self._storages[pid] = _storage(self._tensors, *pid)
        return self._storages[pid]


class _ItemPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(buffer, protocol=_PROTOCOL)
        self._indices = {id(tensor): index for index, tensor in enumerate(tensors)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._indices.get(id(obj)) if isinstance(obj, Tensor) else None


class _ItemUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _storage(file: int, start: int, nbytes: int) -> torch.UntypedStorage:
    """Bytes of a file; changes of them stay in this process."""
    if not nbytes:
        return torch.UntypedStorage(0)
    content: Any
    if nbytes >= _MAPPED:
        content = mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY, offset=start)
    else:
        content = bytearray(os.pread(file, nbytes, start))
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has no state except its values, strides and `requires_grad`."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not (vars(tensor) or tensor._backward_hooks)
    )


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    set_storage: Callable[..., Tensor] = torch.empty(0, dtype=dtype).set_
    return set_storage(storage, offset, shape, stride).requires_grad_(requires_grad)

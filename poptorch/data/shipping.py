"""Send a data set to a process that is being started, its tensors in a file that it maps.

`torch.multiprocessing` would send one descriptor for each tensor, of which a process has few, and
close those of tensors that exist only while they are pickled, as the state of a generator does.
"""

import mmap
import os
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, BinaryIO

import torch
from torch import Tensor

from poptorch.data.nameless_files import in_memory, on_disk

_MAPPED = 1 << 16  # bytes; what is smaller is read: a process can have some 65,000 maps
_PROTOCOL = pickle.HIGHEST_PROTOCOL


class Shipment:
    """A data set, on this side or on the other.

    Args:
        data: the data set.
        by_disk: whether the files are on the disk.
    """

    def __init__(self, data: Any, *, by_disk: bool) -> None:
        self._data, self._by_disk = data, by_disk
        self._files: list[int] = []

    def unpack(self) -> Any:
        """The data set. Not pickled, it is the object itself."""
        return self._data

    def __reduce__(self) -> tuple[Any, ...]:
        """Write the files; only while a process is being started, which gets their descriptors."""
        new = on_disk if self._by_disk else in_memory
        self._files += [new(), new()]
        stream, tensors = self._files[-2:]
        with open(stream, "wb", closefd=False) as out, open(tensors, "wb", closefd=False) as behind:
            _Pickler(out, behind).dump(self._data)
        return _Arrived, (reduction.DupFd(stream), reduction.DupFd(tensors))

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        for file in self._files:
            _close(file)  # bound above: the names of modules may be gone when the interpreter ends


class _Arrived:
    """A shipment on the other side."""

    def __init__(self, stream: Any, tensors: Any) -> None:
        self._stream, self._tensors = stream.detach(), tensors.detach()

    def unpack(self) -> Any:
        with open(self._stream, "rb") as stream, open(self._tensors, "rb") as tensors:
            stream.seek(0)  # its writer, who shares the position, is at the end
            return _Unpickler(stream, tensors.fileno()).load()


class _Pickler(reduction.ForkingPickler):
    """Writes the bytes of tensors into another file than all else."""

    def __init__(self, stream: BinaryIO, tensors: BinaryIO) -> None:
        super().__init__(stream, _PROTOCOL)
        self._tensors = tensors
        self._places: dict[tuple[int, int], tuple[torch.UntypedStorage, int]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        if not _is_plain(obj):
            return obj.__reduce_ex__(_PROTOCOL)
        place = obj.storage_offset(), tuple(obj.shape), obj.stride()
        return _tensor, (obj.untyped_storage(), obj.dtype, *place, obj.requires_grad)

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        if not isinstance(obj, torch.UntypedStorage) or obj.device.type != "cpu":
            return None
        key = obj.data_ptr(), obj.nbytes()
        if key not in self._places:
            if obj.nbytes() >= _MAPPED:
                self._tensors.write(bytes(-self._tensors.tell() % mmap.ALLOCATIONGRANULARITY))
            self._places[key] = obj, self._tensors.tell()  # held, so that no other gets its address
            content = torch.empty(0, dtype=torch.uint8).set_(obj)
            self._tensors.write(content.numpy().data)
        return self._places[key][1], obj.nbytes()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, tensors: int) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def persistent_load(self, pid: tuple[int, int]) -> torch.UntypedStorage:
        if pid not in self._storages:
            self._storages[pid] = _storage(self._tensors, *pid)
        return self._storages[pid]


def _storage(file: int, start: int, nbytes: int) -> torch.UntypedStorage:
    """Bytes of a file, which this process may change for itself."""
    if not nbytes:
        return torch.UntypedStorage(0)
    content: Any
    if nbytes >= _MAPPED:
        content = mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY, offset=start)
    else:
        content = bytearray(os.pread(file, nbytes, start))
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than numbers in memory."""
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
    place: Callable[..., Tensor] = torch.empty(0, dtype=dtype).set_
    return place(storage, offset, shape, stride).requires_grad_(requires_grad)

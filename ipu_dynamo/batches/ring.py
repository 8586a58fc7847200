"""Lay out the slots of a ring of items in memory that two processes share.

The memory is an anonymous file, so the system frees it with the last process that has it open,
however that process ends. If the reader keeps items, the file has more blocks than the ring has
slots: the slot of a kept item is mapped to another block.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from ipu_dynamo.batches.anonymous_files import in_memory
from ipu_dynamo.errors import BatchError

_LiveItem = weakref.KeyedRef[int, memoryview]
_ALIGNMENT = 64  # bytes: one cache line, and every dtype


@dataclass(frozen=True, slots=True)
class RingField:
    """One tensor of every item.

    Args:
        dtype, shape: of the tensor in a full item.
        offset: in a block, in bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The memory layout of all items.

    Args:
        fields: the tensors of an item.
        slots: how many items are in the ring.
        block_nbytes: the size of one item, with padding.
    """

    fields: tuple[RingField, ...]
    slots: int
    block_nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, slots: int, rows: int | None) -> Self:
        """Room for items like this one.

        Args:
            tensors: of the first item, or of a part of it.
            rows: the first dimension of a full item; None: that of `tensors`.
        """
        fields, offset = [], 0
        for tensor in tensors:
            shape = tuple(tensor.shape) if rows is None else (rows, *tensor.shape[1:])
            field = RingField(tensor.dtype, shape, offset)
            fields.append(field)
            offset = _align_up(offset + field.nbytes)
        return cls(tuple(fields), slots, offset)

    @property
    def rows(self) -> tuple[int, ...]:
        """The first dimension of each tensor of a full item; 1 where there is none."""
        return tuple(field.shape[0] if field.shape else 1 for field in self.fields)

    @property
    def first_block(self) -> int:
        """Where the first block begins, after one byte for each slot."""
        return _align_up(self.slots)

    def nbytes(self, blocks: int) -> int:
        """The size of a file with this number of blocks."""
        return self.first_block + blocks * self.block_nbytes


class Ring:
    """The slots, in one of the two processes.

    Invariant: a slot belongs to its writer until it is flagged as full, and to its reader until it
    is flagged as empty. Messages tell the two processes; the flags are for other observers. Each
    slot has a block of its own, which is not the block of another item that is still referenced.

    Args:
        layout: of both processes.
        file: a descriptor of the shared file; the caller may close it afterwards.
    """

    def __init__(self, layout: RingLayout, file: int) -> None:
        self.layout = layout
        self._file = os.dup(file)
        weakref.finalize(self, os.close, self._file)
        self._flags = torch.frombuffer(mmap.mmap(file, layout.first_block), dtype=torch.uint8)
        self._groups: list[memoryview] = []  # of blocks; each doubles their number
        self._blocks = list(range(layout.slots))  # of each slot
        self._count = layout.slots  # of blocks
        self._free: list[int] = []
        self._live: dict[int, _LiveItem] = {}  # by block, while they are referenced
        self._dead: list[_LiveItem] = []  # those that were dropped; any thread may append

    @classmethod
    def create(cls, layout: RingLayout) -> tuple[Self, int]:
        """A new ring, and the descriptor of its file."""
        file = in_memory()
        os.truncate(file, layout.nbytes(layout.slots))
        return cls(layout, file), file

    @property
    def full(self) -> Tensor:
        """Which slots are full: 1 or 0 for each."""
        return self._flags[: self.layout.slots]

    def flag(self, slot: int, *, full: bool) -> None:
        self.full[slot] = full

    def free(self, slot: int) -> int:
        """Map a slot to the block of its next item: its own, unless an item there is in use.

        Another block is one whose item was dropped, or a new one at the end of the file.
        """
        while self._dead:
            block = self._dead.pop().key
            del self._live[block]
            if block not in self._blocks:
                self._free.append(block)
        if self._blocks[slot] in self._live:
            if not self._free:
                self._free = list(range(2 * self._count - 1, self._count - 1, -1))
                self._count *= 2
                os.truncate(self._file, self.layout.nbytes(self._count))
            self._blocks[slot] = self._free.pop()
        return self._blocks[slot]

    def remap(self, slot: int, block: int) -> None:
        """Follow the other process, which has mapped a slot to another block."""
        self._blocks[slot] = block

    def check(self, tensors: Sequence[Tensor], *, fewer_rows: bool) -> None:
        """Refuse tensors that differ from those of the first item.

        Another dtype fits if the dtype of the first item represents all its values exactly.

        Args:
            fewer_rows: whether the first dimension may be smaller.
        """
        fields = self.layout.fields
        if len(tensors) != len(fields):
            raise BatchError(
                f"an item has {len(tensors)} tensors, but the first one has {len(fields)}"
            )
        for index, (tensor, field) in enumerate(zip(tensors, fields, strict=True)):
            shape = tuple(tensor.shape)
            fits = shape == field.shape or (
                fewer_rows
                and len(shape) == len(field.shape)
                and shape[:1] < field.shape[:1]
                and shape[1:] == field.shape[1:]
            )
            if not (fits and _represents(field.dtype, tensor)):
                raise BatchError(
                    f"tensor {index} of an item is {RingField(tensor.dtype, shape, 0)}, but that "
                    f"of the first item is {field}: all items must be alike; pad them in collate_fn"
                )

    def write(self, slot: int, tensors: Sequence[Tensor], start: int) -> None:
        """Copy checked tensors into a slot, from row `start` on."""
        views = self._views(self._memory(self._blocks[slot]))
        for view, tensor in zip(views, tensors, strict=True):
            (view[start : start + len(tensor)] if view.dim() else view).copy_(tensor)

    def read(self, slot: int, rows: Sequence[int] | None) -> list[Tensor]:
        """The tensors of an item in their slot, not copied.

        Args:
            rows: of each tensor; None: the item is full.
        """
        block = self._blocks[slot]
        memory = self._memory(block)  # of this item alone: its tensors and their views hold it
        self._live[block] = weakref.KeyedRef(memory, self._dead.append, block)
        views = self._views(memory)
        if rows is None:
            return views
        return [
            view[:count] if view.dim() else view for view, count in zip(views, rows, strict=True)
        ]

    def _views(self, memory: memoryview) -> list[Tensor]:
        if not memory.nbytes:
            return [torch.empty(field.shape, dtype=field.dtype) for field in self.layout.fields]
        content = torch.frombuffer(memory, dtype=torch.uint8)
        return [
            content[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)
            for field in self.layout.fields
        ]

    def _memory(self, block: int) -> memoryview:
        """The memory of a block, as an object of its own."""
        slots, nbytes = self.layout.slots, self.layout.nbytes
        while len(self._groups) <= (group := (block // slots).bit_length()):
            start = nbytes(self._first_block(len(self._groups)))
            end = nbytes(slots << len(self._groups))
            page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            memory = mmap.mmap(self._file, end - page, offset=page)
            self._groups.append(memoryview(memory)[start - page :])
        start = (block - self._first_block(group)) * self.layout.block_nbytes
        return self._groups[group][start : start + self.layout.block_nbytes]

    def _first_block(self, group: int) -> int:
        return self.layout.slots << group - 1 if group else 0


def _represents(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether a dtype represents all values of a tensor exactly."""
    if tensor.dtype == dtype:
        return True
    back = tensor.to(dtype).to(tensor.dtype)
    both_nan = (back != back) & (tensor != tensor)
    return bool(((back == tensor) | both_nan).all())


def _align_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

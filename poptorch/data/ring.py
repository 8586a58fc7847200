"""Lay out the slots of a ring of items in memory that two processes share.

The memory is an anonymous file, so it is gone with the last process that has it open, however that
one ends. The file has more places than the ring has slots if the program keeps items: the slot of
an item that is still referenced moves to another place.
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

from poptorch.data.nameless_files import in_memory
from poptorch.errors import require

_Item = weakref.KeyedRef[int, memoryview]
_ALIGNMENT = 64  # bytes: one cache line, and every dtype


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of every item.

    Args:
        dtype, shape: what it is in a full item.
        offset: where it lies in a slot, in bytes.
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
class Layout:
    """Where the tensors of each item lie.

    Args:
        fields: the tensors of an item.
        slots: how many items there is room for.
        slot_nbytes: the distance of two slots.
    """

    fields: tuple[Field, ...]
    slots: int
    slot_nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, slots: int, rows: int | None) -> Self:
        """Room for items like this one.

        Args:
            tensors: the tensors of the first item, or of a part of it.
            rows: the first dimension of a full item; None: that of `tensors`.
        """
        fields, offset = [], 0
        for tensor in tensors:
            shape = tuple(tensor.shape) if rows is None else (rows, *tensor.shape[1:])
            field = Field(tensor.dtype, shape, offset)
            fields.append(field)
            offset = _aligned(offset + field.nbytes)
        return cls(tuple(fields), slots, offset)

    @property
    def rows(self) -> tuple[int, ...]:
        """The first dimension of each tensor of a full item; 1 where there is none."""
        return tuple(field.shape[0] if field.shape else 1 for field in self.fields)

    @property
    def first_slot(self) -> int:
        """Where the first slot begins, behind one byte for each slot."""
        return _aligned(self.slots)

    def nbytes(self, places: int) -> int:
        """The size of a file with so many places for items."""
        return self.first_slot + places * self.slot_nbytes


class Ring:
    """The slots, as one of the two processes sees them.

    Invariant: a slot belongs to the process that fills it until it is marked as full, and to the
    other until it is marked as empty. Messages say so; the marks are for who looks. Each slot has
    a place of its own, and no slot has the place of an item that is still referenced.

    Args:
        layout: of both processes.
        file: a descriptor of the shared file; it may be closed afterwards.
    """

    def __init__(self, layout: Layout, file: int) -> None:
        self.layout = layout
        self._file = os.dup(file)
        weakref.finalize(self, os.close, self._file)
        self._marks = torch.frombuffer(mmap.mmap(file, layout.first_slot), dtype=torch.uint8)
        self._groups: list[memoryview] = []  # of places: as many as slots, then as many as so far
        self._places = list(range(layout.slots))  # of each slot
        self._count = layout.slots  # of places
        self._unused: list[int] = []
        self._items: dict[int, _Item] = {}  # by place, while they are referenced
        self._gone: list[_Item] = []  # those that are not any more; any thread may append

    @classmethod
    def create(cls, layout: Layout) -> tuple[Self, int]:
        """A new ring, and the descriptor of its file."""
        file = in_memory()
        os.truncate(file, layout.nbytes(layout.slots))
        return cls(layout, file), file

    @property
    def indices_mem(self) -> Tensor:
        """Which slots are full: 1, or 0. The name is that by which programs look at it."""
        return self._marks[: self.layout.slots]

    def mark(self, slot: int, *, full: bool) -> None:
        self.indices_mem[slot] = full

    def vacate(self, slot: int) -> int:
        """The place where the next item of a slot goes: its own, unless an item there is in use.

        Another place is one whose item is gone, or a new one at the end of the file.
        """
        while self._gone:
            place = self._gone.pop().key
            del self._items[place]
            if place not in self._places:
                self._unused.append(place)
        if self._places[slot] in self._items:
            if not self._unused:
                self._unused = list(range(2 * self._count - 1, self._count - 1, -1))
                self._count *= 2
                os.truncate(self._file, self.layout.nbytes(self._count))
            self._places[slot] = self._unused.pop()
        return self._places[slot]

    def move(self, slot: int, place: int) -> None:
        """Follow the other process, which has chosen another place for a slot."""
        self._places[slot] = place

    def check(self, tensors: Sequence[Tensor], *, fewer_rows: bool) -> None:
        """Refuse tensors that are unlike those of the first item.

        Those of another dtype fit if that of the first item holds their values exactly.

        Args:
            fewer_rows: whether the first dimension may be smaller.
        """
        fields = self.layout.fields
        require(
            len(tensors) == len(fields),
            f"an item has {len(tensors)} tensors, but the first one has {len(fields)}",
        )
        for index, (tensor, field) in enumerate(zip(tensors, fields, strict=True)):
            shape = tuple(tensor.shape)
            fits = shape == field.shape or (
                fewer_rows
                and len(shape) == len(field.shape)
                and shape[:1] < field.shape[:1]
                and shape[1:] == field.shape[1:]
            )
            require(
                fits and _holds(field.dtype, tensor),
                f"tensor {index} of an item is {Field(tensor.dtype, shape, 0)}, but that of the "
                f"first item is {field}: all items must be alike; pad them in collate_fn",
            )

    def write(self, slot: int, tensors: Sequence[Tensor], start: int) -> None:
        """Copy the tensors of an item, or rows of it from row `start` on, that were checked."""
        places = self._views(self._memory(self._places[slot]))
        for place, tensor in zip(places, tensors, strict=True):
            (place[start : start + len(tensor)] if place.dim() else place).copy_(tensor)

    def read(self, slot: int, rows: Sequence[int] | None) -> list[Tensor]:
        """The tensors of an item in their slot, not copied.

        Args:
            rows: of each tensor; None: it is full.
        """
        place = self._places[slot]
        memory = self._memory(place)  # of this item alone: its tensors and their views hold it
        self._items[place] = weakref.KeyedRef(memory, self._gone.append, place)
        views = self._views(memory)
        if rows is None:
            return views
        return [
            view[:count] if view.dim() else view for view, count in zip(views, rows, strict=True)
        ]

    def _views(self, memory: memoryview) -> list[Tensor]:
        if not memory.nbytes:
            return [torch.empty(field.shape, dtype=field.dtype) for field in self.layout.fields]
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        return [
            whole[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)
            for field in self.layout.fields
        ]

    def _memory(self, place: int) -> memoryview:
        """The memory of a place, as an object of its own."""
        slots, nbytes = self.layout.slots, self.layout.nbytes
        while len(self._groups) <= (group := (place // slots).bit_length()):
            start = nbytes(self._first(len(self._groups)))
            end = nbytes(slots << len(self._groups))
            page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            memory = mmap.mmap(self._file, end - page, offset=page)
            self._groups.append(memoryview(memory)[start - page :])
        start = (place - self._first(group)) * self.layout.slot_nbytes
        return self._groups[group][start : start + self.layout.slot_nbytes]

    def _first(self, group: int) -> int:
        """The first place of a group."""
        return self.layout.slots << group - 1 if group else 0


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether a dtype has room for the values of a tensor."""
    if tensor.dtype == dtype:
        return True
    back = tensor.to(dtype).to(tensor.dtype)
    both_nan = (back != back) & (tensor != tensor)
    return bool(((back == tensor) | both_nan).all())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

"""Know which of a model's tensors are newer on another rank.

On a mesh with a dimension `ipu` a program changes the model's tensors on the ranks of their IPUs
alone. The others have old values until `read_weights`, and no program may take these for weights.
Tensors that share memory have the same values, so places are those of memory.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ipu_dynamo.errors import InputError
from ipu_dynamo.runtime.ranks.transport import Transport


@dataclass(frozen=True)
class _Place:
    """Where the newest value of a piece of memory is.

    Args:
        column: of the ranks that have it.
        memory: its bytes in the storage.
        tensor: that a program has changed.
        version: of the tensor here. A later one is the user's, and is new.
    """

    transport: Transport
    column: int
    memory: range
    tensor: "ref[Tensor]"
    version: int

    @property
    def is_rewritten(self) -> bool:
        """Whether the user has written the tensor here since."""
        tensor = self.tensor()
        return tensor is not None and tensor._version != self.version

    @property
    def is_old(self) -> bool:
        """Whether this rank has an old value."""
        return self.column != self.transport.share.column and not self.is_rewritten


_places: dict[StorageWeakRef, list[_Place]] = {}  # by storage; no two of one overlap


def will_change(transport: Transport, columns: Iterable[tuple[Tensor, int]]) -> None:
    """Note tensors that a call changes, each on the ranks of a column."""
    for tensor, column in columns:
        _forget(tensor)
        storage, memory = _memory(tensor)
        place = _Place(transport, column, memory, ref(tensor), tensor._version)
        _places.setdefault(storage, []).append(place)
    for storage in [*_places]:  # at once: other threads note theirs
        if storage.expired():
            _places.pop(storage, None)


def are_read(tensors: Iterable[Tensor]) -> None:
    """Note tensors that have the newest values on all ranks of the row."""
    for tensor in tensors:
        _forget(tensor)


def bring(transport: Transport, tensors: Collection[Tensor]) -> None:
    """Give all ranks of a row the newest values. They call this together, with the same tensors.

    Values that rank 0 has written since then count more.

    Raises:
        InputError: a tensor has parts that are newer on several ranks.
    """
    found = [_own(transport, tensor) for tensor in tensors]
    columns = [0 if place is None else place.column + 1 for place in found]
    first = transport.share.column == 0
    written = [int(first and p is not None and p.column != 0 and p.is_rewritten) for p in found]
    largest = transport.maximum("row", torch.tensor([*columns, *written])).tolist()
    for tensor, column, is_written in zip(
        tensors, largest[: len(columns)], largest[len(columns) :], strict=True
    ):
        if column and not is_written:
            _send(transport, tensor.detach(), column - 1)
    are_read(tensors)


def check_newest(
    tensors: Mapping[str, Tensor], transport: Transport | None, *, compiles: bool
) -> None:
    """Refuse old values of tensors that a rank is about to use.

    Args:
        compiles: the ranks of this transport will `bring` them.

    Raises:
        InputError: some are newer on another rank.
    """
    if not _places:
        return
    old = [
        name
        for name, tensor in tensors.items()
        if any(
            place.is_old and not (compiles and place.transport is transport)
            for place in _overlapping(tensor)
        )
    ]
    if old:
        others = f" and {len(old) - 1} more" if len(old) > 1 else ""
        raise InputError(
            f"{old[0]}{others} of the model are newer on another rank, whose IPU trains them",
            hint=_READ,
        )


_READ = "call read_weights of the training program on all ranks first"


def _own(transport: Transport, tensor: Tensor) -> _Place | None:
    """The place of a tensor on a mesh; None: all ranks have it."""
    places = [place for place in _overlapping(tensor) if place.transport is transport]
    if len({place.column for place in places}) > 1:
        problem = f"parts of a tensor of shape {[*tensor.shape]} are newer on several ranks"
        raise InputError(problem, hint=_READ)
    return next(iter(places), None)


def _overlapping(tensor: Tensor) -> list[_Place]:
    """The places of memory that a tensor has a part of."""
    storage, memory = _memory(tensor)
    return [place for place in _places.get(storage, ()) if _overlap(place.memory, memory)]


def _forget(tensor: Tensor) -> None:
    storage, memory = _memory(tensor)
    if places := _places.get(storage):
        places[:] = [place for place in places if not _overlap(place.memory, memory)]


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _memory(tensor: Tensor) -> tuple[StorageWeakRef, range]:
    """The storage of a tensor, and the bytes from its first element to its last."""
    size, first = tensor.element_size(), tensor.storage_offset()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    end = first + sum((count - 1) * stride for count, stride in pairs) + 1 if tensor.numel() else 0
    return StorageWeakRef(tensor.untyped_storage()), range(first * size, end * size)


def _send(transport: Transport, tensor: Tensor, column: int) -> None:
    """Overwrite a tensor on all ranks of a row with that of one column."""
    own, columns = transport.share.column, range(transport.share.columns)
    message = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if own == column:
        transport.exchange("row", {to: message for to in columns if to != own}, {})
        return
    message = torch.empty_like(message)
    transport.exchange("row", {}, {column: message})
    tensor.copy_(message.view(tensor.dtype).view(tensor.shape))

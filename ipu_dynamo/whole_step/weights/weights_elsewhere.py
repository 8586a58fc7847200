"""Know which of a model's tensors are newer on another rank.

On a mesh with a dimension `ipu` a program changes the model's tensors on the ranks of their IPUs
alone. The others have old values until `read_weights`, and no program may take these for weights.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ipu_dynamo.errors import InputError
from ipu_dynamo.runtime.ranks.transport import Transport

_places = WeakIdKeyDictionary()  # of tensors that a program on several ranks has changed


@dataclass(frozen=True)
class _Place:
    """Where the newest value of a tensor is.

    Args:
        column: of the ranks that have it.
        version: of the tensor here. A later one is the user's, and is new.
    """

    transport: Transport
    column: int
    version: int


def will_change(transport: Transport, columns: Iterable[tuple[Tensor, int]]) -> None:
    """Note tensors that a call changes, each on the ranks of a column."""
    for tensor, column in columns:
        _places[tensor] = _Place(transport, column, tensor._version)


def are_read(tensors: Iterable[Tensor]) -> None:
    """Note tensors that have the newest values on all ranks of the row."""
    for tensor in tensors:
        _places.pop(tensor, None)


def bring(transport: Transport, tensors: Collection[Tensor]) -> None:
    """Give all ranks of a row the newest values. They call this together, with the same tensors.

    Values that rank 0 has written since then count more.
    """
    places = [_places.get(tensor) for tensor in tensors]
    columns = [0 if p is None or p.transport is not transport else p.column + 1 for p in places]
    first = transport.share.column == 0
    written = [
        int(first and p is not None and p.column != 0 and p.version != t._version)
        for p, t in zip(places, tensors, strict=True)
    ]
    found = transport.maximum("row", torch.tensor([*columns, *written])).tolist()
    for tensor, column, is_written in zip(
        tensors, found[: len(columns)], found[len(columns) :], strict=True
    ):
        if column and not is_written:
            _send(transport, tensor.detach(), column - 1)
    are_read(tensors)


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
        if (place := _places.get(tensor)) is not None
        and place.column != place.transport.share.column
        and place.version == tensor._version
        and not (compiles and place.transport is transport)
    ]
    if old:
        others = f" and {len(old) - 1} more" if len(old) > 1 else ""
        raise InputError(
            f"{old[0]}{others} of the model are newer on another rank, whose IPU trains them",
            hint="call read_weights of the training program on all ranks first",
        )

"""Exchange texts, values and tensors that ranks agree on. Nothing is pickled."""

import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import RankFailed
from ipu_dynamo.runtime.ranks.transport import Among, Transport

_BYTES = 1 << 26  # of tensors that are sent together


def gather_values(transport: Transport, among: Among, value: Any) -> list[Any]:
    """Give every rank the JSON values of all, in order of their ranks."""
    own = _bytes_of(value)
    sizes = transport.gather(among, torch.tensor([own.numel()]).view(torch.uint8))
    counts = sizes.view(torch.int64).flatten().tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: own.numel()] = own
    parts = transport.gather(among, padded)
    return [_read(part[:count]) for part, count in zip(parts, counts, strict=True)]


def value_of_first(transport: Transport, value: Any, among: Among = "mesh") -> Any:
    """Return the JSON value of the first rank of a group; those of the others do not count."""
    message = _bytes_of(value)
    size = torch.tensor([message.numel()])
    transport.broadcast(among, size.view(torch.uint8))
    if message.numel() != size:
        message = torch.empty(int(size), dtype=torch.uint8)
    transport.broadcast(among, message)  # a dry run without other ranks leaves the own value
    return _read(message)


def broadcast_tensors(transport: Transport, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with those of the mesh's first rank, which have equal types and shapes.

    A tensor that has the same bits already is not written.
    """
    waiting: list[Tensor] = []
    for place, tensor in enumerate(tensors):
        waiting.append(tensor.detach())
        if sum(t.nbytes for t in waiting) >= _BYTES or place == len(tensors) - 1:
            _broadcast(transport, waiting)
            waiting = []


def _broadcast(transport: Transport, tensors: Sequence[Tensor]) -> None:
    flat = [t.resolve_conj().resolve_neg().contiguous().reshape(-1) for t in tensors]
    message = torch.cat([values.view(torch.uint8) for values in flat])
    transport.broadcast("mesh", message)
    if transport.share.rank == 0:
        return
    parts = message.split([values.nbytes for values in flat])
    for tensor, values, part in zip(tensors, flat, parts, strict=True):
        if not torch.equal(part, values.view(torch.uint8)):
            tensor.copy_(part.clone().view(values.dtype).view(tensor.shape))


def error_of(error: BaseException) -> dict[str, str]:
    """An error as JSON, with the computer that met it."""
    return {"host": socket.gethostname(), "text": f"{type(error).__name__}: {error}"}


def raise_together(own: BaseException | None, others: Sequence[Any], what: str) -> None:
    """Raise this rank's error, or name the first rank that has one.

    Args:
        others: for each rank, the result of `error_of` for its error; None without one.
        what: that a rank could not do.

    Raises:
        RankFailed: another rank has an error, and this one has none.
    """
    if own is not None:
        raise own
    for rank, error in enumerate(others):
        if error is not None:
            raise RankFailed(f"rank {rank} could not {what}: {error['text']}", rank=rank,
                             host=error["host"])  # fmt: skip


def do_together(transport: Transport, what: str, action: Callable[[], Any]) -> list[Any]:
    """Call `action` on each rank of the mesh; return the JSON values of all, in order of the ranks.

    Args:
        what: that `action` does, for the error of other ranks.

    Raises:
        RankFailed: it raised an error on another rank.
    """
    value, error = None, None
    try:
        value = action()
    except BaseException as raised:
        error = raised
    records = gather_values(transport, "mesh", {"value": value, "error": error and error_of(error)})
    raise_together(error, [record["error"] for record in records], what)
    return [record["value"] for record in records]


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _read(message: Tensor) -> Any:
    return json.loads(bytes(message.tolist()))

"""Notice weights and states that the user has written on some ranks of a mesh alone."""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from hashlib import sha256
from weakref import WeakSet

import torch
from torch import Tensor

from ipu_dynamo.errors import RanksDiffer
from ipu_dynamo.ops.private.locks import fork_safe_lock
from ipu_dynamo.runtime.ranks.agreement import gather_values
from ipu_dynamo.runtime.ranks.transport import Transport
from ipu_dynamo.runtime.ranks.vote import CommonValue

_WRITE_ALL = "write the same weights and optimizer states on all ranks"


class WeightsInCommon:
    """Notices the user's writes to weights or states between calls.

    A rank compares the variables that it runs with the other ranks that run them. Of the others it
    has old values, so it compares those that were written here.

    Args:
        tensors: of the program's variables, by name.
        own: the names of those that this rank runs.
        groups: of variables with a leading dimension over groups of replicas, the groups here.
        before: returns the value of a tensor before the step.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        own: Collection[str] = (),
        groups: Mapping[str, Collection[int]] | None = None,
        before: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._tensors, self._own, self._groups = tensors, frozenset(own), groups or {}
        self._before = before
        self._written: set[str] = set()  # by the user, and not compared since
        self._names = {_memory(tensor): name for name, tensor in tensors.items()}
        self._versions = self._now()
        with _lock:
            _every.add(self)

    def _now(self) -> dict[str, int]:
        return {name: tensor._version for name, tensor in self._tensors.items()}

    def note(self) -> None:
        """Take writes since `keep` for the user's."""
        before, self._versions = self._versions, self._now()
        if self._versions != before:
            self._written |= {n for n, count in self._versions.items() if count != before[n]}

    def keep(self) -> None:
        """Take writes since `note` for those of a call or a read, which all ranks make."""
        self._versions = self._now()
        if not self._written:
            written_together(self._tensors.values())

    def forget(self, memories: Set["Memory"]) -> None:
        """Forget writes of memory that all ranks have written since."""
        for memory in self._names.keys() & memories:
            name = self._names[memory]
            self._versions[name] = self._tensors[name]._version
            self._written.discard(name)

    def value(self, rank: int) -> CommonValue:
        """A value for this call. If any rank has written, ranks compare their tensors.

        Args:
            rank: of this process. Where ranks have written, each has another value.
        """
        written = 1 + rank if self._written else 0
        return CommonValue("weights", written, self._digests, may_differ=True, hint=_WRITE_ALL)

    def check_row(self, transport: Transport) -> None:
        """Compare the user's writes on the ranks of a row, before a read overwrites some.

        Raises:
            RanksDiffer: a rank has written a variable that another one runs, and that has not.
        """
        self.note()
        elsewhere = self._written - self._own
        if not transport.maximum("row", torch.tensor([int(bool(elsewhere))])).item():
            return
        of_row = gather_values(transport, "row", self._digests())
        for name in dict.fromkeys(name for digests in of_row for name in digests):
            pairs = zip(transport.share.of_row, of_row, strict=True)
            texts = {rank: digests[name] for rank, digests in pairs if name in digests}
            if len({*texts.values()}) > 1:
                raise RanksDiffer(f"ranks have different {name}", texts, hint=_WRITE_ALL)
        self._written &= self._own  # other rows may have other ones

    def _digests(self) -> dict[str, str]:
        values: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            written = name in self._written
            if name in self._groups:
                own = range(len(tensor)) if written else self._groups[name]
                values |= {f"{name} of group {group}": tensor[group] for group in own}
            elif written or name in self._own:
                values[name] = tensor
        digests = {name: digest_of(bytes_of(self._before(t))) for name, t in values.items()}
        return {name: f"{digest:016x}" for name, digest in digests.items()}

    def agreed(self) -> None:
        """Go on from tensors that are the same."""
        self._written.clear()


Memory = tuple[int, int]  # the address of a tensor, and its bytes
_lock = fork_safe_lock()
_every = WeakSet[WeightsInCommon]()  # of all programs here


def written_together(tensors: Iterable[Tensor]) -> None:
    """Take all writes of tensors for those of all ranks, in the programs that have them, too."""
    memories = {_memory(tensor) for tensor in tensors}
    with _lock:
        programs = [*_every]
    for weights in programs:
        weights.forget(memories)


def _memory(tensor: Tensor) -> Memory:
    return tensor.data_ptr(), tensor.nbytes


def bytes_of(tensor: Tensor) -> bytes:
    """The elements of a tensor in order, as bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def digest_of(data: bytes) -> int:
    """The first 64 bits of a SHA-256."""
    return int.from_bytes(sha256(data).digest()[:8])

"""Define the messages between a worker process and the reader of its items."""

from dataclasses import dataclass

from ipu_dynamo.batches.ring import RingLayout


@dataclass(frozen=True, slots=True)
class RingCreated:
    """The ring exists; the descriptor of its file follows."""

    layout: RingLayout


@dataclass(frozen=True, slots=True)
class ItemReady:
    """A slot is full.

    Args:
        epoch: of the item, from 1.
        slot: that holds its tensors.
        rows: of each of its tensors; None: as many as the slot has room for.
        skeleton: all other parts of the item; None: the same as in the item before.
    """

    epoch: int
    slot: int
    rows: tuple[int, ...] | None
    skeleton: bytes | None


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """All items of an epoch were sent."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """No more items follow."""

    reason: str


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """The reader wants items of this epoch, and no more of earlier epochs."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """A slot is empty.

    Args:
        slot: that may be filled again.
        block: of memory for its next item.
    """

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """The worker process must end."""


FromWorker = RingCreated | ItemReady | EpochEnded | WorkerFailed
ToWorker = BeginEpoch | SlotFreed | StopWorker

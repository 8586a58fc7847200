"""Name what an accessor and its worker process tell each other."""

from dataclasses import dataclass

from poptorch.data.ring import Layout


@dataclass(frozen=True, slots=True)
class Ready:
    """The ring exists; the descriptor of its file follows."""

    layout: Layout


@dataclass(frozen=True, slots=True)
class Item:
    """A slot is full.

    Args:
        epoch: that the item is part of, from 1.
        slot: where its tensors are.
        rows: of each of its tensors; None: as many as there is room for.
        skeleton: all else that it is made of; None: the same as in the item before.
    """

    epoch: int
    slot: int
    rows: tuple[int, ...] | None
    skeleton: bytes | None


@dataclass(frozen=True, slots=True)
class End:
    """The items of an epoch are all said."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more items."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Items of this epoch are wanted, and none of those before."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Free:
    """A slot is empty.

    Args:
        slot: that may be filled again.
        place: where its next item goes.
    """

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker process shall end."""


FromWorker = Ready | Item | End | Failed
ToWorker = Begin | Free | Stop

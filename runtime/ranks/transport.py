"""Define the protocol of transports, which carry messages between the ranks of a mesh."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor

from ipu_dynamo.errors import IpuError
from ipu_dynamo.program.share import Share

Among = Literal["row", "column", "mesh"]  # the ranks that take part
Group = Literal["row", "mesh"]  # those that take part in an operation of the user's
Tag = tuple[int, int, int]  # of a message: its executable, its wire, and the replica in its rank


class Pending(Protocol):
    """A message that is under way. It keeps its memory alive."""

    def wait(self) -> None:
        """Wait for its end. Only threads of the transport's user that may block call this.

        Raises:
            RankLost: the other rank is gone.
        """


class Transport(Protocol):
    """Carries flat tensors of bytes (`uint8`, contiguous) between ranks.

    Messages of one tag arrive in their order. All ranks of a group call its collectives in the same
    order, one at a time. Any thread may send and receive meanwhile. A rank that waits in a
    collective waits on a Python lock, so a signal's handler may end the wait. The collective goes
    on then, and counts as called.

    Every method raises RankLost if a rank that it needs is gone.

    Attributes:
        share: the place of this rank.
    """

    share: Share

    def operation(self, among: Group, kind: str, text: str) -> AbstractContextManager[None]:
        """Say what the ranks do together, for errors of ranks that wait for each other.

        Args:
            kind: operations that follow each other on one rank have the same kinds on the others.
            text: as in "rank 0 is in call 17".
        """

    def follow(self, lost: Callable[[IpuError], None]) -> None:
        """Call a method in another thread once the mesh is lost. Its object may cease to exist."""

    def abandon(self, problem: str) -> IpuError:
        """Give up the mesh, as this rank cannot go on; returns the error of all ranks."""

    def send(self, to: int, tag: Tag, message: Tensor) -> Pending:
        """Send a message. Never waits. The caller writes it only after the send is complete."""

    def receive(self, source: int, tag: Tag, message: Tensor) -> Pending:
        """Receive the next message of a tag into this memory."""

    def gather(self, among: Among, part: Tensor, into: Tensor | None = None) -> Tensor:
        """Give every rank the parts of all, which have one size.

        Returns:
            [ranks, bytes], in order of the ranks; it is `into` if that is given.
        """

    def exchange(
        self, among: Among, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> None:
        """Send parts to other ranks of a group, and receive theirs.

        Args:
            sent, received: by places in the group: the parts, and the memory for theirs.
        """

    def maximum(self, among: Among, values: Tensor) -> Tensor:
        """The largest value of all ranks at each place; values are int64."""

    def broadcast(self, among: Among, message: Tensor) -> None:
        """Overwrite a message with that of the first rank of the group."""

"""Print the values that micro-batches send, in the same order for all workers and schedules.

The lines of one micro-batch come before those of the next, replica by replica. A value that comes
too early waits; after a failure it is printed, too.
"""

from collections.abc import Sequence
from threading import Lock

from torch import Tensor

from ipu_dynamo.ops.marks.print_tensor import Printing
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.observer import Observer


class PrintQueue(Observer):
    """The values that a call prints.

    Invariant: of the places (micro-batch, stream) exactly those before `_next` are printed.

    Args:
        printings: of each stream, in the order of a micro-batch.
    """

    def __init__(self, printings: Sequence[Printing]) -> None:
        self._printings = printings
        self._waiting: dict[tuple[int, int], Tensor] = {}
        self._next = 0, 0
        self._lock = Lock()

    def printed(self, stream: int, micro_batch: int, tensor: Tensor) -> None:
        """Print a tensor as soon as all before it are; none again of a step that runs again."""
        with self._lock:
            place = micro_batch, stream
            if place < self._next:
                return
            self._waiting[place] = tensor if place == self._next else tensor.clone()
            while (place := self._next) in self._waiting:
                self._printings[place[1]](self._waiting.pop(place))
                last = place[1] == len(self._printings) - 1
                self._next = (place[0] + 1, 0) if last else (place[0], place[1] + 1)

    def call_ended(self, streams: HostStreams, complete: bool) -> None:
        """Print all waiting values, in order: the missing ones before them never come."""
        with self._lock:
            for place in sorted(self._waiting):
                self._printings[place[1]](self._waiting.pop(place))

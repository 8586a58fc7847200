"""Read ahead: take items from an iterator in a background thread, a bounded number at once.

A process of `ipu_dynamo.batches` cannot read such a source: the source continues after each epoch,
draws random numbers of the user's process, and may be a generator, which cannot be pickled.
"""

import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger("ipu_dynamo.keras")

T = TypeVar("T")
_PATIENCE = 2.0  # seconds that `close` waits for a source that does not return
_END = object()


@dataclass(frozen=True, slots=True)
class _Failure:
    """The error that the source raised."""

    error: BaseException


class Infeed(Generic[T]):
    """The items of `source` in order, with up to `depth` of them read before they are asked for.

    Invariant: only the thread calls `source`, and `depth` limits how far it is ahead of the reader.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._source = source
        self._room = threading.Semaphore(depth)
        self._ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._closed = False
        # a daemon, so that a source that never returns does not keep the process
        self._thread = threading.Thread(target=self._read, name="ipu-infeed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while (item := self._ready.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            self._room.release()
            yield item  # type: ignore[misc]

    def close(self) -> None:
        """End the thread, after the item that it is reading."""
        self._closed = True
        self._room.release()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            log.warning(
                "the source of the data has not returned for %s seconds; its thread ends when it "
                "returns",
                _PATIENCE,
            )

    def _read(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._closed:
                    return
                item = next(self._source, _END)
                self._ready.put(item)
                if item is _END:
                    return
        except BaseException as error:  # the reader raises it, in its own thread
            self._ready.put(_Failure(error))

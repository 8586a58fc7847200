"""Take the batches of each epoch from a data adapter of Keras, an execution's worth at a time.

Epochs restart or continue the data as Keras' own iterator does, with the same random draws. So a
seed shuffles alike with and without the extension.
"""

import warnings
from collections.abc import Generator, Iterator
from typing import Any

from ipu_dynamo.keras.loop.data.batches import Batch, OneForm, partial_data
from ipu_dynamo.keras.loop.data.infeed import Infeed
from ipu_dynamo.keras.loop.data.sources import Source, source_of
from ipu_dynamo.keras.loop.data.steps import StepPlan
from ipu_dynamo.keras.private.keras_private import partial_end, stop_enqueuer

_RAN_OUT = (
    "Your input ran out of data; interrupting training. Make sure that your dataset or generator "
    "can generate at least `steps_per_epoch * epochs` batches."
)


class _Counting:
    """Checks batches against the form of a call, counting them from a number on."""

    def __init__(self, form: OneForm, number: int) -> None:
        self._form, self._number = form, number

    def __call__(self, batch: Batch) -> None:
        self._form.check(batch, self._number)
        self._number += 1


class Epochs:
    """The epochs of one `fit`, `evaluate` or `predict` on one source of data.

    Invariant: one thread at a time touches the source: the caller's between epochs, that of the
    infeed within one.

    Args:
        adapter: of Keras; its hooks at the ends of epochs are called on the caller's thread.
        plan: the steps of an epoch.
        ends_partial: the last batch of an epoch may have fewer rows.

    Raises:
        ValueError: the last batch is known to be partial, and its step is among those planned.
    """

    def __init__(self, adapter: Any, plan: StepPlan, *, ends_partial: bool = False) -> None:
        self.plan = plan
        self._adapter = adapter
        self._form = OneForm(ends_partial=ends_partial)
        self._size: int | None = adapter.num_batches
        self._current: Source | None = None
        self._seen = 0  # batches of the current pass over the data
        self._ended: str | None = None  # why the epoch has fewer batches than planned
        last = None if ends_partial else partial_end(adapter)
        if last and self._size and 1 < self._size <= plan.batches:
            rows = (self._size - 1) * last.batch_size + last.rows
            raise ValueError(partial_data(rows, last.batch_size))

    def reset(self) -> None:
        """Begin the data anew."""
        self._current, self._seen = None, 0
        self._size = self._adapter.num_batches
        self._adapter.on_epoch_end()

    def executions(self, depth: int) -> Generator[tuple[int, list[Batch]]]:
        """One epoch: the first step of each execution, and its batches.

        Args:
            depth: executions whose batches are read before they are asked for.

        Raises:
            ValueError: batches differ in form, or the data ends within an execution.
        """
        self._adapter.on_epoch_begin()
        if self._current is None or not self.plan.goes_on:
            self._begin()
        self._form.begin()
        self._ended = None
        infeed = Infeed(self._groups(), depth)
        try:
            for index, batches in enumerate(infeed):
                yield index * self.plan.per_execution, batches
        finally:
            infeed.close()
        self._finish()

    def close(self) -> None:
        """End the threads and processes of the source."""
        self._current = None
        stop_enqueuer(self._adapter)

    def _begin(self) -> None:
        self._current, self._seen = source_of(self._adapter), 0

    def _groups(self) -> Iterator[list[Batch]]:
        """The epoch's batches, as many at once as an execution takes; for the infeed's thread."""
        assert self._current is not None
        plan, number = self.plan, 0
        while number < plan.batches:
            wanted = plan.batches_per_execution
            left = wanted if self._size is None else min(wanted, self._size - self._seen)
            batches = self._current.take(left, _Counting(self._form, number))
            self._seen += len(batches)
            number += len(batches)
            if len(batches) == wanted:
                yield batches
                continue
            self._ended = "size" if len(batches) == left else "source"
            if batches:
                raise ValueError(_within_an_execution(number, plan))
            break

    def _finish(self) -> None:
        """Get ready for the next epoch, as Keras does."""
        if self._ended is not None:
            warnings.warn(_RAN_OUT, stacklevel=4)
        if self._ended == "source":
            if self._size is None:
                self._size = self._seen + self.plan.batches_per_execution
            self._current = None
        elif self._size is not None and self._seen >= self._size:
            self._begin()
        self._adapter.on_epoch_end()


def _within_an_execution(number: int, plan: StepPlan) -> str:
    return (
        f"the data ended after {number} batches of this epoch, within an execution: each takes "
        f"{plan.batches_per_execution} batches, {plan.per_execution} steps on each of "
        f"{plan.replicas} replicas. Give as many batches as make whole executions, or choose "
        "another steps_per_execution"
    )

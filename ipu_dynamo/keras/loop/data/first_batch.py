"""Read the first batch of data ahead of the epochs, where a model is built or traced for it."""

from collections.abc import Iterator
from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.loop.data.batches import Batch, normalised
from ipu_dynamo.keras.private.keras_private import (
    Functional,
    Sequential,
    build_by_batch,
    is_array_adapter,
    is_built,
    symbolic_build,
)
from ipu_dynamo.keras.stages.stage_plan import stage_plan
from ipu_dynamo.keras.step.step_variables import Kind


class FirstBatch:
    """The first batch of a source; it is read when it is first asked for, and then begins anew.

    Keras reads one to build a model with, so a seed shuffles as it does there.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._batch: Batch | None = None

    @property
    def was_read(self) -> bool:
        """Whether the source is within an epoch, which `on_epoch_end` of the adapter ends."""
        return self._batch is not None

    def get(self) -> Batch:
        """The batch.

        Raises:
            ValueError: there is none.
        """
        if self._batch is None:
            self._adapter.on_epoch_begin()
            loader = self._adapter.get_torch_dataloader()
            for data in loader:
                self._batch = normalised(data, copy=not is_array_adapter(self._adapter))
                break
            else:
                raise ValueError("the data has no batch")
        return self._batch


def build_for_data(model: Any, kind: Kind, first: FirstBatch) -> None:
    """Build the parts that are not built, and find out whether the model has stages."""
    if kind != "predict":
        symbolic_build(model, _as_epoch(first))
    elif not is_built(model):
        build_by_batch(model, first.get()[0])
    if not isinstance(model, Functional | Sequential) and _may_have_stages(model):
        stage_plan(model, first.get()[0], training=kind == "fit")


def _as_epoch(first: FirstBatch) -> Iterator[tuple[int, int, list[Batch]]]:
    """The first batch as data to build from; Keras reads it only if something is not built."""
    yield 0, 0, [first.get()]


def _may_have_stages(model: Any) -> bool:
    """Whether it is still unknown if a Model subclass enters a `PipelineStage`."""
    state = state_of(model)
    return state.assignment is None and state.meets_stages is None

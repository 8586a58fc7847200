"""Make the list of callbacks of a call, and name its hooks by the kind of call."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.loop.execution import Kind
from ipu_dynamo.keras.private.keras_private import abandon
from ipu_dynamo.keras.settings.enumerations import ReplicatedMetricReductionMethod


@dataclass(frozen=True, slots=True)
class BatchHooks:
    """The hooks around batches of one kind of call, and the flag that ends it."""

    begin: Callable[[int], None]
    end: Callable[[int, Any], None]
    flag: str

    @classmethod
    def of(cls, callbacks: Any, kind: Kind) -> "BatchHooks":
        match kind:
            case "fit":
                hooks = callbacks.on_train_batch_begin, callbacks.on_train_batch_end
                return cls(*hooks, "stop_training")
            case "evaluate":
                hooks = callbacks.on_test_batch_begin, callbacks.on_test_batch_end
                return cls(*hooks, "stop_evaluating")
            case "predict":
                hooks = callbacks.on_predict_batch_begin, callbacks.on_predict_batch_end
                return cls(*hooks, "stop_predicting")


class MeanProgress(keras.callbacks.ProgbarLogger):  # type: ignore[misc]
    """Show the mean over replicas where a metric is a list of theirs."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, _means(logs))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_test_batch_end(batch, _means(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, _means(logs))

    def on_test_end(self, logs: Any = None) -> None:
        super().on_test_end(_means(logs))


def callback_list(
    model: Any, callbacks: Any, *, verbose: Any, epochs: int, steps: int, history: bool = False
) -> Any:
    """The callbacks of a call as one `CallbackList`; one that the caller passes stays as it is.

    Args:
        callbacks: the user's argument.
        steps: of an epoch, for `params`.
        history: whether a `History` is added.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    listed = keras.tree.flatten(callbacks) if callbacks else []
    if state_of(model).settings.metric_reduction is ReplicatedMetricReductionMethod.LIST:
        plain = keras.callbacks.ProgbarLogger
        listed = [MeanProgress() if type(callback) is plain else callback for callback in listed]
        if verbose != 0 and not any(isinstance(callback, plain) for callback in listed):
            listed.append(MeanProgress())
    return keras.callbacks.CallbackList(
        listed,
        add_history=history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


@contextmanager
def threads_ended(callbacks: Any) -> Any:
    """End the list's own threads if the block raises."""
    try:
        yield
    except BaseException:
        abandon(callbacks)
        raise


def _means(logs: Any) -> Any:
    return {
        name: float(np.mean(value)) if isinstance(value, list) else value
        for name, value in (logs or {}).items()
    }

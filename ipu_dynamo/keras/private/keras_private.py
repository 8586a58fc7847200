"""Wrap Keras' private names, so that only this file needs a check for a new Keras.

Checked on keras 3.15.1. Each function or name is small and says where it stands in Keras.
"""

import contextlib
import queue
import time
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras.src.models.functional import Functional as Functional
from keras.src.models.model import Model as Model
from keras.src.models.model import functional_init_arguments as functional_init_arguments
from keras.src.models.sequential import Sequential as Sequential
from keras.src.ops.node import Node as Node
from keras.src.ops.operation import Operation as Operation

CHECKED_VERSION = "3.15.1"


def registered_names() -> dict[Any, str]:
    """Names under which classes were registered for files, by class: `object_registration`."""
    from keras.src.saving import object_registration

    names: dict[Any, str] = object_registration.GLOBAL_CUSTOM_NAMES
    return names


# The training loop: keras.src.trainers, keras.src.callbacks, keras.src.backend.torch.


@dataclass(frozen=True, slots=True)
class PartialBatch:
    """The last batch of a source, which has fewer rows than the others."""

    rows: int
    batch_size: int


def make_adapter(**data: Any) -> Any:
    """The data adapter for what users give as data: `trainers.data_adapters.get_data_adapter`."""
    from keras.src.trainers.data_adapters import get_data_adapter

    return get_data_adapter(**data)


def split_validation(arrays: Any, fraction: float) -> Any:
    """Arrays to train and to validate with: `trainers.data_adapters.array_slicing`."""
    from keras.src.trainers.data_adapters.array_slicing import train_validation_split

    return train_validation_split(arrays, validation_split=fraction)


def weights_of_classes(y: Any, class_weight: Any) -> Any:
    """Sample weights by class: `trainers.data_adapters.data_adapter_utils`."""
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    return class_weight_to_sample_weights(y, class_weight)


def is_array_adapter(adapter: Any) -> bool:
    """Whether an adapter slices arrays: `trainers.data_adapters.array_data_adapter`."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return isinstance(adapter, ArrayDataAdapter)


class ArrayReader:
    """Read many batches at once, which the loader of an `ArrayDataAdapter` reads one by one.

    Its random draws are the loader's, in their order.

    Args:
        loader: of the adapter, for arrays of which `reads_at_once` holds.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset, self._iterator = loader.dataset, iter(loader)

    def next(self, count: int) -> tuple[list[int], Any]:
        """The rows of each of the next batches, fewer at the end of the data, and all of them as
        one."""
        indices: list[list[int]] = []
        with contextlib.suppress(StopIteration):
            while len(indices) < count:
                indices.append(self._iterator._next_index())
        rows = [index for batch in indices for index in batch]
        data = self._dataset.__getitems__(rows) if rows else None
        return [len(batch) for batch in indices], data


def reads_at_once(adapter: Any) -> bool:
    """Whether several batches can be read as one, by all their rows: those of dense arrays."""
    if not is_array_adapter(adapter):
        return False
    leaves = [leaf for leaf in keras.tree.flatten(adapter._inputs) if leaf is not None]
    return all(
        type(leaf) is np.ndarray
        or (isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
        for leaf in leaves
    )


def partial_end(adapter: Any) -> PartialBatch | None:
    """The partial batch at the end of arrays. Loaders do not say whether they drop theirs."""
    if is_array_adapter(adapter) and adapter.partial_batch_size:
        return PartialBatch(adapter.partial_batch_size, adapter.batch_size)
    return None


def stop_enqueuer(adapter: Any) -> None:
    """End the workers of a `PyDataset`: `trainers.data_adapters.py_dataset_adapter`."""
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is None:
        return
    thread = enqueuer.run_thread
    # an exception of a worker, after the error that ended the loop, concerns no caller
    with contextlib.suppress(Exception):
        enqueuer.stop()
    end = time.monotonic() + 2.0
    while thread is not None and thread.is_alive() and time.monotonic() < end:
        # after an error `stop` leaves the queue full, and the thread waits for room in it
        with contextlib.suppress(queue.Empty):
            enqueuer.future_queue.get_nowait()
        thread.join(0.01)


def to_tensor(value: Any) -> Any:
    """A tensor of an array or a number: `backend.torch.core.convert_to_tensor`."""
    from keras.src.backend.torch.core import convert_to_tensor

    return convert_to_tensor(value)


def call_in_order(callbacks: Any) -> None:
    """Keep a `CallbackList` from handing batch hooks to threads of its own."""
    for name in ("_async_train", "_async_test", "_async_predict"):
        setattr(callbacks, name, False)


def abandon(callbacks: Any) -> None:
    """End the threads of a `CallbackList` whose end hooks will not be called."""
    if callbacks._executor is not None:
        callbacks._executor.shutdown(wait=True, cancel_futures=True)
    callbacks._executor, callbacks._futures = None, []
    callbacks._in_begin_end_block_count = 0


def python_logs(logs: Any) -> Any:
    """Logs with Python numbers: `utils.python_utils.pythonify_logs`."""
    from keras.src.utils.python_utils import pythonify_logs

    return pythonify_logs(logs)


def to_numpy(value: Any) -> Any:
    """An array of a tensor: `backend.torch.core.convert_to_numpy`."""
    from keras.src.backend.torch.core import convert_to_numpy

    return convert_to_numpy(value)


def in_stateless_scope() -> bool:
    """Whether variables are read from a mapping: `backend.common.stateless_scope`."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return bool(in_stateless_scope())


def build_by_batch(model: Any, x: Any) -> None:
    """Make the weights of a model that has none yet, for inputs like `x`, without computing.

    As `Trainer._symbolic_build`, which builds loss and metrics too.
    """
    from keras.src import backend

    if is_built(model):
        return
    symbolic = keras.tree.map_structure(
        lambda value: (
            None
            if value is None
            else keras.KerasTensor(value.shape, keras.utils.standardize_dtype(value.dtype))
        ),
        x,
    )
    backend.compute_output_spec(model, symbolic, training=False)


def variable_value(variable: Any) -> Any:
    """The tensor of a variable, past any scope: `KerasVariable._value`."""
    return variable._value


def is_built(model: Any) -> bool:
    """Whether every layer has its weights: as `Trainer._symbolic_build` asks."""
    return all(layer.built for layer in model._flatten_layers())


def symbolic_build(model: Any, batches: Any) -> None:
    """Build the parts of model, loss, metrics and optimizer that are not built: `Trainer`.

    Args:
        batches: an iterator whose first item is `(0, 0, [batch])`; it is read only if needed.
    """
    model._symbolic_build(iterator=batches)


def metrics_or_logs(model: Any, logs: Any) -> Any:
    """The model's metrics if they have the keys of `logs`, else these: `Trainer`."""
    return model._get_metrics_result_or_logs(logs)

"""Train an extended model: the loop of Keras, with executions of several steps."""

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras

from ipu_dynamo.keras.loop.callback_list import callback_list, threads_ended
from ipu_dynamo.keras.loop.evaluate import VALIDATION
from ipu_dynamo.keras.loop.execution import make_function
from ipu_dynamo.keras.loop.frame import prepared_data, shown
from ipu_dynamo.keras.loop.log_lines import advise_steps, tell_effective_batch
from ipu_dynamo.keras.loop.prepare import Prepared
from ipu_dynamo.keras.loop.run_epoch import Work, run_epoch
from ipu_dynamo.keras.private.keras_private import metrics_or_logs, split_validation


@dataclass(frozen=True, slots=True)
class Validation:
    """The arguments and the frequency of validation in `fit`."""

    arguments: dict[str, Any]
    frequency: int | Sequence[int]

    def due(self, model: Any, epoch: int) -> bool:
        return bool(model._should_eval(epoch, self.frequency))

    def run(self, model: Any, callbacks: Any) -> dict[str, Any]:
        """Validate, by the model's own `evaluate`, which users may have extended."""
        logs = model.evaluate(
            **self.arguments,
            callbacks=callbacks,
            return_dict=True,
            _use_cached_eval_dataset=True,
        )
        return {f"val_{name}": value for name, value in logs.items()}


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
) -> Any:
    """Run `fit` of an extended model; arguments as in Keras."""
    model._assert_compile_called("fit")
    advise_steps(model)
    epochs = _capped(epochs)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = split_validation(
            (x, y, sample_weight), validation_split
        )
    validation = None
    if validation_data is not None:
        val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
        arguments = {
            "x": val_x,
            "y": val_y,
            "sample_weight": val_weight,
            "batch_size": validation_batch_size or batch_size,
            "steps": validation_steps,
        }
        validation = Validation(arguments, validation_freq)
    data = prepared_data(
        model,
        "fit",
        argument="steps_per_epoch",
        number=steps_per_epoch,
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        shuffle=shuffle,
        class_weight=class_weight,
    )
    epoch_range = range(initial_epoch, epochs)
    with data as prepared, _validation_data(model, validation, epoch_range):
        try:
            prepared.epochs.reset()
            callbacks = callback_list(
                model,
                callbacks,
                verbose=verbose,
                epochs=epochs,
                steps=prepared.plan.steps,
                history=True,
            )
            with threads_ended(callbacks), shown(verbose):
                _train(model, prepared, validation, callbacks, epoch_range)
        finally:
            model.eval()
    return model.history


@contextmanager
def _validation_data(
    model: Any, validation: Validation | None, epoch_range: range
) -> Iterator[None]:
    """Have the data of validations ready, before the first step of training, so that data which
    does not fit stops nothing half-way."""
    if validation is None or not any(validation.due(model, epoch) for epoch in epoch_range):
        yield
        return
    arguments = dict(validation.arguments)
    number = arguments.pop("steps")
    data = prepared_data(
        model, "evaluate", argument="validation_steps", number=number, shuffle=False, **arguments
    )
    with data as prepared:
        vars(model)[VALIDATION] = prepared
        try:
            yield
        finally:
            del vars(model)[VALIDATION]


def _train(
    model: Any,
    prepared: Prepared,
    validation: Validation | None,
    callbacks: Any,
    epoch_range: range,
) -> None:
    """Run the epochs, in the order of Keras' own loop."""
    model.stop_training = False
    function = make_function(model, "fit")
    work = Work(function, prepared.shape, prepared.epochs, callbacks)
    callbacks.on_train_begin()
    # a callback may have set the first epoch in on_train_begin: BackupAndRestore does
    first_epoch = model._initial_epoch or epoch_range.start
    epoch_logs: dict[str, Any] = {}
    for epoch in range(first_epoch, epoch_range.stop):
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        model.train()
        last: deque[Any] = deque(maxlen=1)
        told = (
            None
            if epoch > first_epoch
            else partial(tell_effective_batch, shape=work.shape, plan=prepared.plan)
        )
        run_epoch(work, last, told)
        epoch_logs = dict(metrics_or_logs(model, last[0] if last else {}))
        model.eval()
        if validation and validation.due(model, epoch):
            epoch_logs.update(validation.run(model, callbacks))
        callbacks.on_epoch_end(epoch, epoch_logs)
        if model.stop_training:
            break
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epoch_range.stop > 0:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    callbacks.on_train_end(logs=epoch_logs)


def _capped(epochs: int) -> int:
    """The number of epochs, with the limit that users set for debugging."""
    limit = keras.config.max_epochs()
    if limit and limit < epochs:
        warnings.warn(f"Limiting epochs to {limit}", stacklevel=3)
        return int(limit)
    return epochs

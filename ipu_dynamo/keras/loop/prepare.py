"""Prepare a call: the data's adapter, its steps, and the shape of an execution, before any step."""

import warnings
from dataclasses import dataclass
from typing import Any

import keras

from ipu_dynamo.keras.calls.programs import CallShape, call_shape, replica_count
from ipu_dynamo.keras.loop.data.epochs import Epochs
from ipu_dynamo.keras.loop.data.first_batch import FirstBatch, build_for_data
from ipu_dynamo.keras.loop.data.steps import StepPlan, plan_steps
from ipu_dynamo.keras.loop.execution import Kind
from ipu_dynamo.keras.private.keras_private import make_adapter, stop_enqueuer


@dataclass(frozen=True, slots=True)
class Prepared:
    """The data of a call, and the shape of its executions; everything was checked."""

    epochs: Epochs
    shape: CallShape

    @property
    def plan(self) -> StepPlan:
        return self.epochs.plan


def prepare(model: Any, kind: Kind, *, argument: str, number: int | None, **data: Any) -> Prepared:
    """Read the properties of the data, build the model for it, and plan the steps.

    Args:
        argument: the name of the number's argument.
        number: batches of an epoch, over all replicas, or None for all of the data.
        data: `x`, `y`, `sample_weight`, `batch_size`, `shuffle`, `class_weight`.

    Raises:
        ValueError, RuntimeError: the options, the machine or the data do not allow this call.
    """
    number = _capped(number)
    adapter = make_adapter(steps_per_epoch=number, **data)
    try:
        first = FirstBatch(adapter)
        build_for_data(model, kind, first)
        plan = plan_steps(
            argument=argument,
            number=number,
            size=adapter.num_batches,
            per_execution=model.steps_per_execution,
            replicas=replica_count(model),
        )
        shape = call_shape(model, kind, plan.per_execution)
        # alone in an execution, a smaller batch is a program of its own on the same variables
        alone = (shape.steps, shape.replicas) == (1, 1) and not shape.pipelined
        prepared = Prepared(Epochs(adapter, plan, ends_partial=alone), shape)
    except BaseException:
        stop_enqueuer(adapter)
        raise
    if kind == "predict" and first.was_read:  # the other two reset in any case, as Keras does
        prepared.epochs.reset()
    return prepared


def _capped(number: int | None) -> int | None:
    """The number of batches, with the limit that users set for debugging."""
    limit = keras.config.max_steps_per_epoch()
    if limit and (number is None or limit < number):
        warnings.warn(f"Limiting steps_per_epoch to {limit}", stacklevel=4)
        return int(limit)
    return number

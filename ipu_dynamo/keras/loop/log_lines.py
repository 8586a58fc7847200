"""Log advice for users, and the effective batch size of an execution."""

import logging
from typing import Any

import keras

from ipu_dynamo.keras.calls.programs import CallShape
from ipu_dynamo.keras.loop.data.batches import Batch
from ipu_dynamo.keras.loop.data.steps import StepPlan

log = logging.getLogger("ipu_dynamo.keras")
ADVISED = "_ipu_dynamo_advised"  # in the instance's __dict__


def advise_steps(model: Any) -> None:
    """Advise once, for each model, to run several steps in an execution."""
    if model.steps_per_execution == 1 and not vars(model).get(ADVISED):
        vars(model)[ADVISED] = True
        log.info(
            "%s runs one step in each execution: compile(..., steps_per_execution=n) with a larger "
            "n spends less time between executions",
            model.name,
        )


def tell_effective_batch(batch: Batch, shape: CallShape, plan: StepPlan) -> None:
    """Say how many rows an update sees, and how many updates there are."""
    rows = next(leaf.shape[0] for leaf in keras.tree.flatten(batch[0]) if leaf is not None)
    updates = shape.steps // shape.accumulation
    log.info(
        "effective batch size %d = batch %d x gradient accumulation %d x replicas %d; "
        "weight updates: %d per execution, %d per epoch",
        rows * shape.accumulation * shape.replicas,
        rows,
        shape.accumulation,
        shape.replicas,
        updates,
        updates * (plan.steps // plan.per_execution),
    )

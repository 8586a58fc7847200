"""Run one execution of a model: what `make_train_function` and the like give."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.calls.joined_results import StepResults
from ipu_dynamo.keras.calls.programs import (
    CallShape,
    call_shape,
    explain_step,
    inspected,
    program_for,
    replica_count,
)
from ipu_dynamo.keras.loop.data.batches import Batch, normalised
from ipu_dynamo.keras.loop.results import joined_rows, reduced_logs, remember_logs
from ipu_dynamo.keras.step.step_variables import Kind as Kind

OnStep = Callable[[int, Sequence[Any]], None]

_ATTRIBUTES: dict[Kind, str] = {
    "fit": "train_function",
    "evaluate": "test_function",
    "predict": "predict_function",
}


class ExecutionFunction:
    """Run the batches of one execution on a model.

    It holds nothing that is compiled: programs are looked up at each call, so that options which
    changed in between act.
    """

    def __init__(self, model: Any, kind: Kind) -> None:
        self.model, self.kind = model, kind

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Run an execution of as many steps as `batches` are.

        Args:
            batches: each `x` or a tuple of up to three; batch i goes to replica i mod r.

        Returns:
            The logs of the last step; of predict, the outputs with the rows in order.
        """
        replicas = replica_count(self.model)
        steps, remainder = divmod(len(batches), replicas)
        if remainder or not steps:
            raise ValueError(
                f"{len(batches)} batches cannot be divided among {replicas} replicas: each step "
                "takes one batch on every replica"
            )
        shape = call_shape(self.model, self.kind, steps)
        return self.run([normalised(batch, copy=False) for batch in batches], shape)

    def run(self, batches: Sequence[Batch], shape: CallShape, on_step: OnStep | None = None) -> Any:
        """As a call, for batches in their normal form, and a shape that was checked.

        Args:
            batches: as many as the steps of all replicas.
            shape: of the execution.
            on_step: is called with each step and its results, one per replica, while others run.
        """
        program = program_for(self.model, self.kind, batches[0], shape)
        steps = program.run(batches, on_step)
        if self.kind == "predict" and isinstance(steps, StepResults):
            return steps.whole()
        if self.kind == "predict":
            return joined_rows([output for replicas in steps for output in replicas])
        logs = reduced_logs(state_of(self.model).settings.metric_reduction, steps[-1])
        remember_logs(self.model, logs)
        return logs


def explained(model: Any, *data: Any) -> Inspection:
    """Describe the programs of a model's steps.

    Without a program, describe the one of `fit` on `x` and `y`, or of `predict` on `x`.
    """
    seen = inspected(model)
    if seen.programs:
        return seen
    kind: Kind = "fit" if len(data) > 1 and model.compiled else "predict"
    shape = call_shape(model, kind, max(1, model.steps_per_execution // replica_count(model)))
    explained = explain_step(model, kind, normalised(data, copy=False), shape)
    return replace(explained, title=seen.title)


def is_execution_function(function: Any) -> bool:
    """Whether a model's `train_function` and so on is one of ours."""
    return isinstance(function, ExecutionFunction)


def make_function(model: Any, kind: Kind, force: bool = False) -> ExecutionFunction:
    """The model's function; one of Keras, made outside of the scope, is replaced."""
    function = getattr(model, _ATTRIBUTES[kind])
    if isinstance(function, ExecutionFunction) and not force:
        return function
    function = ExecutionFunction(model, kind)
    setattr(model, _ATTRIBUTES[kind], function)
    return function

"""Run the executions of one epoch, with the callbacks around batches."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.attach.thread_state import THREAD
from ipu_dynamo.keras.calls.programs import CallShape
from ipu_dynamo.keras.loop.callback_list import BatchHooks
from ipu_dynamo.keras.loop.data.batches import Batch
from ipu_dynamo.keras.loop.data.epochs import Epochs
from ipu_dynamo.keras.loop.execution import ExecutionFunction, Kind
from ipu_dynamo.keras.loop.outfeed import CallbackThread
from ipu_dynamo.keras.loop.results import reduced_logs
from ipu_dynamo.keras.private.keras_private import call_in_order
from ipu_dynamo.keras.settings.enumerations import ReplicatedMetricReductionMethod
from ipu_dynamo.keras.settings.model_settings import Settings

Begun = Callable[[Batch], None]
Executions = Generator[tuple[int, list[Batch]]]


@dataclass(frozen=True, slots=True)
class Work:
    """The parts of a call's work in each epoch.

    Args:
        function: runs an execution.
        shape: of an execution.
        epochs: the data.
        callbacks: a `CallbackList`.
    """

    function: ExecutionFunction
    shape: CallShape
    epochs: Epochs
    callbacks: Any

    @property
    def model(self) -> Any:
        return self.function.model

    @property
    def kind(self) -> Kind:
        return self.function.kind


def is_asynchronous(settings: Settings, kind: Kind, shape: CallShape) -> bool:
    """Whether callbacks come for each step; accumulated results of a pipeline come too late."""
    accumulated = shape.pipelined and bool(settings.accumulate_outfeed) and kind != "predict"
    return settings.asynchronous_callbacks and not accumulated


def run_epoch(work: Work, results: deque[Any], begun: Begun | None = None) -> None:
    """Run one epoch, until the data ends or a callback stops it.

    Args:
        results: gets the logs, or outputs, of each execution.
        begun: gets the first batch, before its execution.
    """
    settings = state_of(work.model).settings
    hooks = BatchHooks.of(work.callbacks, work.kind)
    depth = settings.infeed_keywords.get("prefetch_depth", 1)
    # closed, so that the infeed's thread ends with the epoch, and not with its last reference
    with closing(_announced(work.epochs.executions(depth), begun)) as executions:
        if is_asynchronous(settings, work.kind, work.shape):
            _run_asynchronous(work, hooks, settings, executions, results)
        else:
            _run_synchronous(work, hooks, executions, results)


def _announced(executions: Executions, begun: Begun | None) -> Executions:
    with closing(executions):
        for first, batches in executions:
            if first == 0 and begun is not None:
                begun(batches[0])
            yield first, batches


def _run_synchronous(
    work: Work, hooks: BatchHooks, executions: Executions, results: deque[Any]
) -> None:
    """Call the hooks once for each execution, between executions."""
    for first, batches in executions:
        hooks.begin(first)
        result = work.function.run(batches, work.shape)
        results.append(result)
        last = first + work.shape.steps - 1
        hooks.end(last, {"outputs": result} if work.kind == "predict" else result)
        if getattr(work.model, hooks.flag):
            break


def _run_asynchronous(
    work: Work, hooks: BatchHooks, settings: Settings, executions: Executions, results: deque[Any]
) -> None:
    """Call the hooks for each step of each replica, in a thread, while the program runs."""
    call_in_order(work.callbacks)

    def deliver(step: int, replicas: Sequence[Any]) -> None:
        THREAD.calls_back = work.model
        for logs in _logs_of_step(settings, work.kind, replicas):
            hooks.begin(step)
            hooks.end(step, logs)

    depth = settings.outfeed_keywords.get("buffer_depth", 1) * work.shape.steps
    with CallbackThread(deliver, depth) as thread:
        for first, batches in executions:
            on_step = partial(_put, thread, first)
            result = work.function.run(batches, work.shape, on_step)
            thread.check()
            results.append(result)
            if getattr(work.model, hooks.flag):
                break


def _put(thread: CallbackThread, first: int, step: int, replicas: Sequence[Any]) -> None:
    thread.put(first + step, replicas)


def _logs_of_step(settings: Settings, kind: Kind, replicas: Sequence[Any]) -> Sequence[Any]:
    """The logs for each of a step's callback calls, one call per replica."""
    if kind == "predict":
        return [{"outputs": outputs} for outputs in replicas]
    if settings.metric_reduction is ReplicatedMetricReductionMethod.NONE:
        return replicas
    return [reduced_logs(settings.metric_reduction, replicas)] * len(replicas)

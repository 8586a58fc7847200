"""Report the events of a call to the objects that follow it.

An executable joins the observers of a call into one, and hands it to the form that runs the steps:
the loop of micro-batches or the fused step. An event that no observer follows costs no call:

    if observer.step_ended is not None:
        observer.step_ended(step, read)
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from ipu_dynamo.program.schedule.actions import AddGradients, RunPass
from ipu_dynamo.program.schedule.stage_passes import StagePass
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.timed import InstructionEnded, Interval

Read = Callable[[str, int], Tensor]  # the current tensor of a variable on a replica


class Observer:
    """Follows calls. A subclass has a method for each event that it follows; the others are None.

    Workers report received, sent, printed, task_ended, values_held and instruction_ended from their
    own threads. The thread of the call reports all other events. An error that a method raises ends
    the call, as an error of the step does. A replayed step, which runs no Python, reports received,
    sent, task_ended and step_timed after it ends, with its own times, and no instruction. Several
    such steps run without Python between them unless the observer `needs_single_steps`.

    Micro-batches are numbered over the call and all replicas, in the order [D, A, R] of `Batching`.

    Attributes:
        call_began: before the first step. Gets the number of micro-batches.
        received: after a micro-batch has its inputs. Gets the micro-batch and the time that took.
        sent: after an IPU has left all outputs of a micro-batch to the host. Gets the same.
        printed: for each value that a model prints. Gets the number of the stream among those
            that print, the micro-batch, and the value.
        task_ended: after each run of a pass, and after gradients that passes return are added. Gets
            the worker, the pass, the action and its time.
        values_held: after the same, unless the step is fused. Gets the replica, the micro-batch of
            the step, and for each IPU the bytes of the values that the micro-batch holds.
        instruction_ended: after each instruction in a pass or around the micro-batches of a step.
            Gets the worker, the pass and the action, which are None around the micro-batches, the
            instruction and its time. While somebody follows it, passes and instructions are rows of
            PyTorch's profiler.
        update_began: after the micro-batches of a step, before its update writes a variable; in a
            fused step before both. Gets the step's number in the call, and a function that reads
            variables.
        step_ended: after a step is complete, its update included. Gets the same.
        step_timed: after the same. Gets the step's number in the call, and its time.
        iteration_ended: after a device iteration is complete, in order; in training after its step.
            Gets the streams of the call and the iteration's number.
        call_ended: after the last step, or after an error has ended the call. Gets the streams of
            the call, and whether all steps are complete.
    """

    call_began: Callable[[int], None] | None = None
    received: Callable[[int, Interval], None] | None = None
    sent: Callable[[int, Interval], None] | None = None
    printed: Callable[[int, int, Tensor], None] | None = None
    task_ended: Callable[[int, StagePass, RunPass | AddGradients, Interval], None] | None = None
    values_held: Callable[[int, int, Mapping[int, int]], None] | None = None
    instruction_ended: InstructionEnded | None = None
    update_began: Callable[[int, Read], None] | None = None
    step_ended: Callable[[int, Read], None] | None = None
    step_timed: Callable[[int, Interval], None] | None = None
    iteration_ended: Callable[[HostStreams, int], None] | None = None
    call_ended: Callable[[HostStreams, bool], None] | None = None

    @property
    def needs_single_steps(self) -> bool:
        """Whether it follows an event whose method has to run between two steps."""
        between = self.update_began, self.step_ended, self.iteration_ended, self.printed
        return any(between)


NOBODY = Observer()


def joined(*observers: Observer | None) -> Observer:
    """Join observers into one, which calls their methods in this order."""
    present = [*filter(None, observers)]
    if len(present) < 2:
        return present[0] if present else NOBODY
    together = Observer()
    for event in Observer.__annotations__:
        if methods := [*filter(None, map(attrgetter(event), present))]:
            setattr(together, event, partial(_report, methods))
    return together


def _report(methods: list[Callable[..., None]], *arguments: Any) -> None:
    for method in methods:
        method(*arguments)

"""Stand in for the tensors of a call, and for its workers: all tasks run in turn."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ipu_dynamo.program import HostProgram, Input, Program
from ipu_dynamo.program.ir.values import Variable
from ipu_dynamo.program.schedule.actions import AddGradients, RunPass
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.runtime.execute.host_io.batching import ALIGNED, Batching
from ipu_dynamo.runtime.execute.host_io.host_streams import Print, SentStream, made_here


def stored(host: HostProgram, variable: Variable) -> Tensor:
    """A tensor like the one that the model gives for a variable."""
    shape, strides = variable.type.shape, variable.strides
    if variable.groups is not None:
        groups = 1 + max(host.replicas.groups_of(variable.groups))
        return torch.empty((groups, *shape), dtype=variable.type.dtype)
    if strides is not None:
        return torch.empty_strided(shape, strides, dtype=variable.type.dtype)
    return torch.empty(shape, dtype=variable.type.dtype)


def values_of(
    stream: Input, batching: Batching, replicas: range
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What a caller passes for a stream, and the values that `HostLink` makes of it.

    Args:
        replicas: those that run here, as the program numbers them.
    """
    b, shape = batching, stream.type.shape
    if stream.source != "host":
        return (), made_here(stream, b, replicas, torch.device("cpu"), 0, 0)
    full = (b.splits * shape[0], *shape[1:]) if shape else ()
    whole = torch.empty(full, dtype=stream.type.dtype)
    views = (whole,) if b.splits == 1 else whole.view(b.splits, *shape).unbind(0)
    # copied as `Batching.split` does, of a tensor that begins where PyTorch's allocator lets it
    at = [view.storage_offset() * view.itemsize for view in views]
    values = [v.clone() if a % ALIGNED else v for a, v in zip(at, views, strict=True)]
    return (whole,), b.of_replicas(values)


def sent_streams(program: Program, batching: Batching) -> list[SentStream | Print]:
    """Where the outputs of a call go; those that print have no values here."""
    kept = [[k for row in batching.kept(o) for k in row] for o in program.outputs]
    return [
        _nobody_prints if output.printing else SentStream(flags, batching.micro_batches)
        for output, flags in zip(program.outputs, kept, strict=True)
    ]


def _nobody_prints(micro_batch: int, value: Tensor) -> None:
    """Stand in for what prints values."""


def in_turn(schedule: Schedule) -> Schedule:
    """The same tasks on one worker, by their time; of several workers, as if each took its turn."""
    turns: list[tuple[int, int, RunPass | AddGradients]] = []
    for worker, actions in enumerate(schedule.timed().workers):
        cycle = 0
        for action in actions:
            if isinstance(action, RunPass):
                cycle = action.cycle
            if isinstance(action, RunPass | AddGradients):
                turns.append((cycle, worker, action))
    turns.sort(key=lambda turn: turn[:2])
    return replace(schedule, workers=(tuple(action for *_, action in turns),), transfers=())

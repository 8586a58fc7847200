"""Make a step happen as a whole or not at all: undo what an incomplete one has written."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_copy_, foreach_zero_
from ipu_dynamo.program import Program, Update, Variable
from ipu_dynamo.tune.costs import LARGE_UPDATE


class Undo:
    """Remember what the micro-batches of a step overwrite.

    Invariant: after an error in its block, all tensors are as at the last `begin`.

    Args:
        written: tensors that micro-batches write, such as the statistics of a batch norm.
        sums: tensors that are zero at the beginning of each step.
    """

    def __init__(self, written: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        self._written, self._sums = list(written), list(sums)
        self._kept = [tensor.clone() for tensor in written]

    def begin(self) -> None:
        if self._written:
            foreach_copy_(self._kept, self._written)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            return
        if self._written:
            foreach_copy_(self._written, self._kept)
        if self._sums:
            foreach_zero_(self._sums)


def undo_of(program: Program, replicas: int, tensor: Callable[[str, int], Tensor]) -> Undo:
    """What undoes an incomplete step of `program`, whose variables `tensor` finds by replica."""
    functions = {function.name: function for function in program.functions}
    names = {c.arguments[i] for c in program.calls for i in functions[c.function].written}
    written, sums = [], []
    for variable in program.variables:
        for replica in variable.holders(replicas):
            if variable.kind == "accumulator":
                sums.append(tensor(variable.name, replica))
            elif variable.name in names:
                written.append(tensor(variable.name, replica))
    return Undo(written, sums)


def worth_holding(updates: Sequence[Update], variables: Sequence[Variable]) -> bool:
    """Whether updates take so long that `uninterrupted`, two system calls, costs nothing beside.

    Smaller ones are over before a person could aim at them, and a step may take as long as the
    two calls.
    """
    size = {variable.name: prod(variable.type.shape) for variable in variables}
    return sum(size[name] for update in updates for name in update.parameters) >= LARGE_UPDATE


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; only the main thread can be interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])

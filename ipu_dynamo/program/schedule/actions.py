"""Define the actions of workers: run a pass, send values, receive them, add gradients.

A worker sends values to another worker, which receives them before the pass that waits for them.
Passes of one worker share its registers and need no transfer. Within a process a send only marks
that the values are there, and a receive waits for the mark. A copy to another device is part of
the pass that makes the value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RunPass:
    """Run the stage pass `index` of a micro-batch, counted on its replica and in its step.

    It begins in `cycle` and is planned to take `length` cycles.
    """

    cycle: int
    index: int
    micro_batch: int
    replica: int = 0
    length: int = 1


@dataclass(frozen=True, slots=True)
class SendValues:
    """Hand over the values of a transfer that a micro-batch has made."""

    transfer: int
    micro_batch: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveValues:
    """Wait for the values of a transfer that another worker sends, of a micro-batch.

    `replica` is that of the sender: another one than the reader's, where replicas exchange values.
    """

    transfer: int
    micro_batch: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class AddGradients:
    """Add the gradients that the passes of a micro-batch have returned to their sums."""

    micro_batch: int
    replica: int = 0


Action = RunPass | SendValues | ReceiveValues | AddGradients


def follow(
    workers: Sequence[Sequence[Action]], does: Callable[[int, Action], bool]
) -> tuple[int, ...]:
    """Let each worker do its actions in order, until none can go on.

    Args:
        does: does an action of the worker of this number, and says so; False: the worker waits.

    Returns:
        How many actions each worker has done: all, or those before one that waits for ever.
    """
    done = [0] * len(workers)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(workers):
            while done[worker] < len(actions) and does(worker, actions[done[worker]]):
                done[worker] += 1
                moved = True
    return tuple(done)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The values that the pass `source` leaves for the pass `target` on another worker.

    Args:
        values: their names. Without a value the target only waits for the source. A source after
            its target in the program allows the target another micro-batch.
    """

    source: int
    target: int
    values: tuple[str, ...] = ()

"""Define the actions of workers: run a pass, send values, receive them, add gradients.

A worker sends values to the worker of a pass that waits for them, which receives them. Values
between passes of one worker need no action: the worker has them in its registers. Within a process
a send marks that the values are there, and a receive waits for the mark. Nothing is copied: a copy
to another device is part of the pass that makes the value.
"""

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
    """Wait for the values of a transfer that another worker sends, of a micro-batch."""

    transfer: int
    micro_batch: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class AddGradients:
    """Add the gradients that the passes of a micro-batch have returned to their sums."""

    micro_batch: int
    replica: int = 0


Action = RunPass | SendValues | ReceiveValues | AddGradients


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the pass `source` leaves for the pass `target` on another worker.

    Args:
        values: their names. None: the target only waits for the source. A source that comes after
            its target allows it a further micro-batch.
    """

    source: int
    target: int
    values: tuple[str, ...] = ()

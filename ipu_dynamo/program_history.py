"""Keep the programs that were compiled most recently, to be looked at."""

from collections import deque

from ipu_dynamo.program import Program

_LIMIT = 32
_recent: deque[Program] = deque(maxlen=_LIMIT)


def programs() -> tuple[Program, ...]:
    """The programs that were compiled most recently, through any door, oldest first, at most 32.

    A model that is trained through `torch.compile(backend="ipu")` has two: its forward and its
    backward pass. `torch._dynamo.reset()` forgets them.
    """
    return tuple(_recent)


def remember(program: Program) -> None:
    _recent.append(program)


def forget() -> None:
    _recent.clear()

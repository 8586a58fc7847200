"""Hold what is particular to a thread: the strategies of its scopes, and its pipeline stage."""

import threading
from typing import Any


class ThreadState(threading.local):
    """One object for all threads, whose attributes each thread has for itself.

    Args:
        strategies: those whose scopes are open, the innermost last.
        stage: the stage of the open `PipelineStage`, or None.
        stages_entered: how many `PipelineStage` blocks were entered so far.
    """

    def __init__(self) -> None:
        self.strategies: list[Any] = []
        self.stage: int | None = None
        self.stages_entered = 0


THREAD = ThreadState()


def innermost_strategy() -> Any:
    """The strategy whose scope this thread is in, or None."""
    return THREAD.strategies[-1] if THREAD.strategies else None


def extensions_active() -> bool:
    """Whether this thread is in a scope whose strategy extends Keras models."""
    strategy = innermost_strategy()
    return strategy is not None and bool(strategy.enable_keras_extensions)

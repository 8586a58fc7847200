"""Hold the state of each thread: the strategies of its scopes, and its pipeline stage."""

import threading
from typing import Any


class ThreadState(threading.local):
    """One object for all threads, whose attributes each thread has for itself.

    Args:
        strategies: those whose scopes are open, the innermost last.
        stage: the stage of the open `PipelineStage`, or None.
        stages_entered: how many `PipelineStage` blocks were entered so far.
        calls_back: the model whose asynchronous callbacks this thread calls, or None.
    """

    def __init__(self) -> None:
        self.strategies: list[Any] = []
        self.stage: int | None = None
        self.stages_entered = 0
        self.calls_back: Any = None


THREAD = ThreadState()


def innermost_strategy() -> Any:
    """The strategy whose scope this thread is in, or None."""
    return THREAD.strategies[-1] if THREAD.strategies else None


def extensions_active() -> bool:
    """Whether this thread is in a scope whose strategy extends Keras models."""
    strategy = innermost_strategy()
    return strategy is not None and bool(strategy.enable_keras_extensions)

"""Frame what `fit`, `evaluate` and `predict` have in common: data that is closed, one pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ipu_dynamo.keras.loop.callback_list import BatchHooks, callback_list, threads_ended
from ipu_dynamo.keras.loop.execution import Kind, make_function
from ipu_dynamo.keras.loop.prepare import Prepared, prepare
from ipu_dynamo.keras.loop.run_epoch import Work


@contextmanager
def prepared_data(model: Any, kind: Kind, **arguments: Any) -> Iterator[Prepared]:
    """The data of a call, until what its source has running is ended; arguments as in `prepare`."""
    prepared = prepare(model, kind, **arguments)
    try:
        yield prepared
    finally:
        prepared.epochs.close()


@contextmanager
def single_pass(
    model: Any, kind: Kind, prepared: Prepared, *, verbose: Any, callbacks: Any
) -> Iterator[Work]:
    """What runs over the data once, as in `evaluate` and `predict`.

    Args:
        callbacks: what the user passed.
    """
    callbacks = callback_list(
        model, callbacks, verbose=verbose, epochs=1, steps=prepared.plan.steps
    )
    model.eval()
    function = make_function(model, kind)
    setattr(model, BatchHooks.of(callbacks, kind).flag, False)
    with threads_ended(callbacks):
        yield Work(function, prepared.shape, prepared.epochs, callbacks)

"""Frame what `fit`, `evaluate` and `predict` have in common: data that is closed, one pass."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ipu_dynamo.keras.loop.callback_list import BatchHooks, callback_list, threads_ended
from ipu_dynamo.keras.loop.execution import Kind, make_function
from ipu_dynamo.keras.loop.prepare import Prepared, prepare
from ipu_dynamo.keras.loop.run_epoch import Work
from ipu_dynamo.progress import watched_by


@contextmanager
def prepared_data(model: Any, kind: Kind, **arguments: Any) -> Iterator[Prepared]:
    """The data of a call, until what its source has running is ended; arguments as in `prepare`."""
    prepared = prepare(model, kind, **arguments)
    try:
        yield prepared
    finally:
        prepared.epochs.close()


def shown(verbose: Any) -> AbstractContextManager[None]:
    """Show what is compiled, unless the user wants to see nothing."""
    return watched_by(None) if verbose == 0 else nullcontext()


@contextmanager
def single_pass(
    model: Any, kind: Kind, prepared: Prepared, *, verbose: Any, callbacks: Any
) -> Iterator[Work]:
    """Prepare a single run over the data, as in `evaluate` and `predict`.

    Args:
        callbacks: the user's argument.
    """
    callbacks = callback_list(
        model, callbacks, verbose=verbose, epochs=1, steps=prepared.plan.steps
    )
    model.eval()
    function = make_function(model, kind)
    setattr(model, BatchHooks.of(callbacks, kind).flag, False)
    with threads_ended(callbacks), shown(verbose):
        yield Work(function, prepared.shape, prepared.epochs, callbacks)

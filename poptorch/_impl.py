"""Offer what PopTorch programs and libraries reach through `poptorch._impl`."""

from poptorch.errors import createPoptorchError
from poptorch.executor.executor import PoplarExecutor
from poptorch.tracing import isRunningOnIpu
from poptorch.unwrapping import is_wrapped as isWrapped
from poptorch.unwrapping import rewrap as _restoreWrapperIfNecessary
from poptorch.unwrapping import rewrap_model as rewrapModelIfNecessary
from poptorch.unwrapping import unwrap as unwrapIfWrapped
from poptorch.unwrapping import unwrap_model as unwrapModelIfNecessary


def isDispatchTracing() -> bool:
    """Whether a model is being traced for an executor right now."""
    return isRunningOnIpu()


__all__ = [
    "PoplarExecutor",
    "_restoreWrapperIfNecessary",
    "createPoptorchError",
    "isDispatchTracing",
    "isRunningOnIpu",
    "isWrapped",
    "rewrapModelIfNecessary",
    "unwrapIfWrapped",
    "unwrapModelIfNecessary",
]

"""Run together with the other instances: so far with none, and more are refused."""

from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from popdist._environment import getInstanceIndex, getNumInstances, isPopdistEnvSet

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_initialized = False


def init() -> None:
    """Connect the instances. It may be called again.

    Raises:
        RuntimeError: there is more than one, which this version cannot connect.
    """
    global _initialized
    _refuse_several()
    _initialized = True


def initializeBackend() -> None:
    """Do what `init` does."""
    init()


def finalizeBackend() -> None:
    """End what `init` began."""
    global _initialized
    _initialized = False


def isBackendInitialized() -> bool:
    """Whether `init` was called, and `finalizeBackend` not since."""
    return _initialized


def registerCommunicator(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a single instance has nobody to talk to.

    Raises:
        RuntimeError: there is more than one instance.
    """
    _refuse_several()


def execute_on_instances(
    instances: Collection[int],
    function: Callable[_Arguments, _Result],
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> _Result | None:
    """Call a function on some instances.

    Args:
        instances: the numbers of those that call it.

    Returns:
        its result, or None where this instance is none of them.
    """
    return function(*args, **kwargs) if getInstanceIndex() in instances else None


def _refuse_several() -> None:
    if isPopdistEnvSet() and (instances := getNumInstances()) > 1:
        raise RuntimeError(
            f"a launcher started {instances} instances: this version of popdist connects none, so "
            "run the program as one process, with all replicas in it"
        )

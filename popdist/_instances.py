"""Connect the instances, and let some of them act together.

torch.distributed is imported when several instances are connected.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from popdist._environment import getInstanceIndex, getNumInstances, isPopdistEnvSet

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
_Instances = frozenset[int]

_initialized = False
_made_the_group = False  # by `init`, so that `finalizeBackend` ends it
_acting: list[_Instances] = []  # those of each `execute_on_instances` around, innermost last
_communicators: dict[str, _Instances] = {}


def init() -> None:
    """Connect the instances. It may be called again.

    Several instances make torch.distributed's default group, or take the one that is there.

    Raises:
        RuntimeError: no launcher says where they meet, or the group has another size.
    """
    global _initialized, _made_the_group
    if _are_several():
        _made_the_group |= _connect()
    _initialized = True


def initializeBackend() -> None:
    """Do what `init` does."""
    init()


def finalizeBackend() -> None:
    """End what `init` made: a process group that was there before stays."""
    global _initialized, _made_the_group
    made, _made_the_group, _initialized = _made_the_group, False, False
    _communicators.clear()
    if not made:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def isBackendInitialized() -> bool:
    """Whether `init` was called, and `finalizeBackend` not since."""
    return _initialized


def registerCommunicator(participants: Collection[int], communicator_id: str = "default") -> None:
    """Name some instances, for `synchronize`. A single instance has no use for it.

    Args:
        participants: the numbers of the instances, from 0.
        communicator_id: the name, which `synchronize` takes.
    """
    if _are_several():
        _communicators[communicator_id] = frozenset(participants)


def synchronize(communicator_id: str | None = None) -> None:
    """Wait for all instances, or within `execute_on_instances` for those that it names.

    Args:
        communicator_id: a name that `registerCommunicator` has: wait for its participants instead.

    Raises:
        RuntimeError: there are several instances, and `init` did not connect them.
    """
    if not _are_several():
        return
    if not _initialized:
        raise RuntimeError("call popdist.init() before popdist.synchronize()")
    from popdist._collectives import describe

    instances = acting_instances() if communicator_id is None else _communicators[communicator_id]
    if getInstanceIndex() in instances:
        with _limited_to(instances):
            describe("synchronize", [], acting_ranks())


def execute_on_instances(
    instances: Collection[int],
    function: Callable[_Arguments, _Result],
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> _Result | None:
    """Call a function on some instances. Its collectives are theirs alone.

    Args:
        instances: the numbers of those that call it, from 0.
        function: what they call.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of `function`; None on an instance that does not call it.
    """
    if getInstanceIndex() not in instances:
        return None
    with _limited_to(frozenset(instances)):
        return function(*args, **kwargs)


def acting_instances() -> _Instances:
    """The instances that act together now: all, or those of `execute_on_instances`."""
    return _acting[-1] if _acting else frozenset(range(getNumInstances()))


def acting_ranks() -> list[int]:
    """The processes of the instances that act together now; [0] where no group is there."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [0]
    instances = sorted(acting_instances().intersection(range(getNumInstances())))
    columns = dist.get_world_size() // getNumInstances()  # processes of one instance
    return [instance * columns + column for instance in instances for column in range(columns)]


@contextmanager
def _limited_to(instances: _Instances) -> Iterator[None]:
    """Let collectives be those of some instances."""
    _acting.append(instances)
    try:
        yield
    finally:
        _acting.pop()


def _are_several() -> bool:
    return isPopdistEnvSet() and getNumInstances() > 1


def _connect() -> bool:
    """Make the default group of all processes; return whether it was not there."""
    from ipu_dynamo.errors import OptionError
    from ipu_dynamo.runtime.ranks.process_group import connect, mesh_of_environment

    try:
        rows, columns = mesh_of_environment() or (getNumInstances(), 1)
        if rows != getNumInstances():
            raise OptionError(
                f"IPU_DYNAMO_MESH has {rows} rows, but the launcher started {getNumInstances()} "
                "instances: give it one row for each"
            )
        return connect(rows * columns)
    except OptionError as error:
        raise RuntimeError(str(error)) from None

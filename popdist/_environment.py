"""Read a launcher's variables; without a launcher each has the value of a single process."""

import os

_TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"


def isPopdistEnvSet() -> bool:
    """Whether a launcher started this process."""
    return _TOTAL_REPLICAS in os.environ


def getNumTotalReplicas() -> int:
    """How many replicas all instances have together."""
    return _number(_TOTAL_REPLICAS, alone=1)


def getNumLocalReplicas() -> int:
    """How many replicas this instance has."""
    return _number("POPDIST_NUM_LOCAL_REPLICAS", alone=1)


def getNumIpusPerReplica() -> int:
    """How many IPUs one replica has."""
    return _number("POPDIST_NUM_IPUS_PER_REPLICA", alone=1)


def getReplicaIndexOffset() -> int:
    """The number of the first replica of this instance, among all replicas."""
    return _number("POPDIST_REPLICA_INDEX_OFFSET", alone=0)


def getNumInstances() -> int:
    """How many processes there are."""
    return _instances(getNumTotalReplicas(), "replicas")


def getInstanceIndex() -> int:
    """The number of this process, from 0."""
    return _instances(getReplicaIndexOffset(), "replicas before this instance")


def getLocalInstanceIndex() -> int:
    """The number of this process among those of this host, from 0."""
    return _number("POPDIST_LOCAL_INSTANCE_INDEX", alone=0)


def getDeviceId(ipus_per_replica: int = 0) -> int:
    """Return 0: virtual IPUs have no numbers.

    Args:
        ipus_per_replica: has no effect.
    """
    return 0


def checkNumIpusPerReplica(num_ipus_per_replica: int) -> None:
    """Refuse another number of IPUs than the launcher was told.

    Args:
        num_ipus_per_replica: how many IPUs one replica of the program has.

    Raises:
        RuntimeError: it is another one. Without a launcher any number is right.
    """
    if isPopdistEnvSet() and num_ipus_per_replica != getNumIpusPerReplica():
        raise RuntimeError(
            f"the program has {num_ipus_per_replica} IPUs per replica, but the launcher was told "
            f"{getNumIpusPerReplica()}: start it with as many IPUs per replica as the program has"
        )


def _instances(replicas: int, what: str) -> int:
    """How many instances of equal size `replicas` are."""
    uniform = os.environ.get(_UNIFORM) if isPopdistEnvSet() else None
    if uniform not in (None, "1"):
        raise RuntimeError(
            f"instances have different numbers of replicas ({_UNIFORM}={uniform}), so that they "
            "cannot be counted: give every instance as many"
        )
    local = getNumLocalReplicas()
    if local < 1 or replicas % local:
        raise RuntimeError(
            f"{replicas} {what} are no whole number of instances of {local} replicas: check "
            f"{_TOTAL_REPLICAS}, POPDIST_NUM_LOCAL_REPLICAS and POPDIST_REPLICA_INDEX_OFFSET"
        )
    return replicas // local


def _number(variable: str, alone: int) -> int:
    """The value of a launcher's variable; `alone` in a process without a launcher."""
    if not isPopdistEnvSet():
        return alone
    text = os.environ.get(variable)
    try:
        return int(text or "")
    except ValueError:
        raise RuntimeError(
            f"{variable} must be an integer where {_TOTAL_REPLICAS} is set, got {text!r}"
        ) from None

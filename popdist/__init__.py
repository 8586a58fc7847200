"""Say which of several processes this is, from the variables that a launcher sets.

Without them, one process is alone. `init()` connects several, by torch.distributed.
"""

from popdist import popdist_core
from popdist._environment import (
    checkNumIpusPerReplica,
    getDeviceId,
    getInstanceIndex,
    getLocalInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
    isPopdistEnvSet,
)
from popdist._instances import (
    execute_on_instances,
    finalizeBackend,
    init,
    initializeBackend,
    isBackendInitialized,
    registerCommunicator,
    synchronize,
)

__all__ = [
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "finalizeBackend",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "initializeBackend",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "popdist_core",
    "registerCommunicator",
    "synchronize",
]

"""Say which of several processes this is, from the variables that a launcher sets.

Without them, one process is alone. Several are not connected yet: `init()` refuses them.
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
]

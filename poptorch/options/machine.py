"""Choose which machine runs a program, and how it is used."""

from poptorch.enums import ConnectionType, SyncPattern
from poptorch.errors import require
from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, setter
from poptorch.options.popart import _PopartOptions
from poptorch.strategies import ExecutionStrategy

_IPU_VERSIONS = (1, 2, 21)
_NO_SYNTHETIC_DATA, _RANDOM_NORMAL = 0, 2


class MachineOptions(OptionsDict):
    """The setters of `Options` that concern IPUs."""

    _popart: _PopartOptions
    _execution_strategy: ExecutionStrategy

    @setter(Effect.MACHINE)
    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> None:
        """Choose how blocks become stages, and stages take turns.

        Args:
            strategy: such as `poptorch.ShardedExecution()`.
        """
        require(
            isinstance(strategy, ExecutionStrategy),
            f"strategy must be an execution strategy such as poptorch.PipelinedExecution(), "
            f"got {strategy!r}",
        )
        self._execution_strategy = strategy

    @setter(Effect.COMPUTES)
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> None:
        """Leave IPUs idle, with a warning, where their number is no power of two.

        Args:
            auto_round_num_ipus: False: such a number is an error.
        """
        self.set(auto_round_num_ipus=auto_round_num_ipus)

    @setter(Effect.MACHINE)
    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> None:
        """Limit the memory that products may use for temporary values.

        Args:
            available_memory_proportion: from "IPU0", "IPU1", ... to a share from 0 to 1.
        """
        shares = {}
        for name, share in available_memory_proportion.items():
            require(name.startswith("IPU"), f'keys must look like "IPU0", got {name!r}')
            if not 0 <= share <= 1:
                raise ValueError(f"the proportion of {name} must be from 0 to 1, got {share}")
            shares[int(name.removeprefix("IPU"))] = share
        self.set(available_memory_proportion=shares)

    @setter(Effect.COMPUTES)
    def useIpuModel(self, use_model: bool) -> None:
        """Choose the IPU Model, which runs any number of IPUs, instead of a device.

        Args:
            use_model: False: a device, also if the environment selects the IPU Model.
        """
        self.createOrSet(use_model=use_model)

    @setter(Effect.COMPUTES)
    def useOfflineIpuTarget(self, ipu_version: int = 2) -> None:
        """Compile without a device.

        Args:
            ipu_version: 1 (Mk1), 2 (Mk2) or 21 (Mk2 with FP8).
        """
        if ipu_version not in _IPU_VERSIONS:
            raise ValueError(f"ipu_version must be one of {_IPU_VERSIONS}, got {ipu_version!r}")
        self.connectionType(ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)

    @setter(Effect.COMPUTES)
    def connectionType(self, connection_type: ConnectionType) -> None:
        """Choose when IPUs are reserved.

        Args:
            connection_type: Always, OnDemand or Never.
        """
        require(
            isinstance(connection_type, ConnectionType),
            f"connection_type must be a poptorch.ConnectionType, got {connection_type!r}",
        )
        self.set(connection_type=connection_type.value)

    @setter(Effect.MACHINE)
    def syncPattern(self, sync_pattern: SyncPattern) -> None:
        """Choose which IPUs take part in a barrier.

        Args:
            sync_pattern: Full, SinglePipeline or ReplicaAndLadder.
        """
        require(
            isinstance(sync_pattern, SyncPattern),
            f"sync_pattern must be a poptorch.SyncPattern, got {sync_pattern!r}",
        )
        self.set(sync_pattern=sync_pattern.value)

    @setter(Effect.COMPUTES)
    def useIpuId(self, ipu_id: int) -> None:
        """Ask for one particular IPU or group of IPUs, which one executor has at a time.

        Args:
            ipu_id: number of the IPU or group, from 0.
        """
        require(isinstance(ipu_id, int), f"ipu_id must be an int, got {ipu_id!r}")
        self.createOrSet(ipu_id=ipu_id)

    @setter(Effect.COMPUTES)
    def enableStableNorm(self, enabled: bool) -> None:
        """Take the statistics of normalisations on halves in float32.

        Those of float32 are taken with the mean first in any case.

        Args:
            enabled: False, the default, takes them in half.
        """
        self._popart.store("enableStableNorm", enabled)

    @setter(Effect.COMPUTES)
    def enableSyntheticData(self, enabled: bool) -> None:
        """Compute on random inputs, and transfer neither inputs nor outputs.

        Args:
            enabled: False, the default, transfers both.
        """
        mode = _RANDOM_NORMAL if enabled else _NO_SYNTHETIC_DATA
        self._popart.store("syntheticDataMode", mode)

    @setter(Effect.COMPUTES)
    def updatableNamedBuffers(self, buffers: list[str]) -> None:
        """Name the buffers that `copyNamedBuffersToDevice` uploads.

        Args:
            buffers: names as in `model.named_buffers()`.
        """
        self._popart.store("updatableNamedBuffers", buffers)

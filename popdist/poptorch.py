"""Give PopTorch options the replicas and the process that a launcher chose."""

from typing import Any, NoReturn

import popdist
import poptorch
from poptorch.options import _DistributedOptions
from poptorch.options.container import OptionsDict


class Options(poptorch.Options):
    """Options of one instance: the launcher decides how many replicas and processes there are.

    Args:
        ipus_per_replica: how many IPUs the model has; checked against the launcher's number.

    Raises:
        RuntimeError: the launcher was told another number.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            popdist.checkNumIpusPerReplica(ipus_per_replica)
        self.set(replication_factor=popdist.getNumLocalReplicas())
        self._distributed = _Distributed()

    def useIpuId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the launcher chooses."""
        _refuse("useIpuId")

    def replicationFactor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the launcher chooses."""
        _refuse("replicationFactor")


class _Distributed(_DistributedOptions):
    """`Options.Distributed` of this instance."""

    def __init__(self) -> None:
        OptionsDict.__init__(  # not the base class's: it reads other variables
            self,
            distributed_process_id=popdist.getInstanceIndex(),
            num_distributed_processes=popdist.getNumInstances(),
            ipuof_configs={},
        )

    def disable(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the launcher chooses."""
        _refuse("Distributed.disable")

    def setEnvVarNames(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the launcher chooses."""
        _refuse("Distributed.setEnvVarNames")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the launcher chooses."""
        _refuse("Distributed.configureProcessId")


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{name}` with popdist.poptorch.Options")


__all__ = ["Options"]

"""Tell a process which of several it is."""

import os
from typing import ClassVar

from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, setter


class _DistributedOptions(OptionsDict):
    """`Options.Distributed`: one process alone, unless the environment of an MPI run says more."""

    _PREFIX: ClassVar[str] = "Distributed."

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    @setter(Effect.COMPUTES)
    def disable(self) -> None:
        """Be the only process, also if the environment names several."""
        self.configureProcessId(0, 1)

    @setter(Effect.COMPUTES)
    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> None:
        """Read the number of processes and this process's number from environment variables.

        Args:
            var_num_processes: name of the variable that has the number of processes.
            var_process_id: name of the variable that has the number of this process, from 0.
        """
        processes = int(os.environ.get(var_num_processes, "1"))
        self.configureProcessId(int(os.environ.get(var_process_id, "0")), processes)

    @setter(Effect.COMPUTES)
    def configureProcessId(self, process_id: int, num_processes: int) -> None:
        """Be process `process_id` of `num_processes`.

        Args:
            process_id: number of this process, from 0.
            num_processes: how many processes work together.
        """
        self.set(distributed_process_id=process_id)
        self.set(num_distributed_processes=num_processes)

    @property
    def processId(self) -> int:
        """The number of this process, from 0."""
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        """How many processes work together."""
        return int(self.num_distributed_processes)

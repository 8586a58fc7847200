"""Set what `popdist` reads for one process of `poprun`, and become the program.

Usage: _start.py REPLICAS INSTANCES IPUS_PER_REPLICA COLUMNS PROGRAM [ARGUMENT ...]

torchrun starts this file once for each process. It imports nothing but `os` and `sys`, because the
program may use another Python.
"""

import os
import sys


def variables(replicas: int, instances: int, ipus: int, columns: int) -> dict[str, str]:
    """The variables of this process. Each instance has as many processes as columns."""
    local = replicas // instances
    instance, local_instance = (int(os.environ[name]) // columns for name in ("RANK", "LOCAL_RANK"))
    values = {
        "POPDIST_NUM_TOTAL_REPLICAS": replicas,
        "POPDIST_NUM_LOCAL_REPLICAS": local,
        "POPDIST_NUM_IPUS_PER_REPLICA": ipus,
        "POPDIST_REPLICA_INDEX_OFFSET": instance * local,
        "POPDIST_LOCAL_INSTANCE_INDEX": local_instance,
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": 1,
    }
    return {name: str(value) for name, value in values.items()}


if __name__ == "__main__":
    os.environ.update(variables(*map(int, sys.argv[1:5])))
    os.execvp(sys.argv[5], sys.argv[5:])

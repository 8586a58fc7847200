"""Connect the processes that a launcher started: make torch.distributed's default group.

torchrun says which process this is by RANK and WORLD_SIZE, mpirun by OMPI_COMM_WORLD_RANK and
OMPI_COMM_WORLD_SIZE. The group carries messages over gloo.
"""

import functools
import itertools
import os
import re
from typing import Any

from ipu_dynamo.errors import OptionError

_MESH = "IPU_DYNAMO_MESH"
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_ADDRESS, _PORT, _USUAL_PORT = "MASTER_ADDR", "MASTER_PORT", "29500"
_groups = itertools.count()  # those that this process has made


def mesh_of_environment() -> tuple[int, int] | None:
    """The rows and columns that IPU_DYNAMO_MESH asks for, such as `2x4`; None: it is not set.

    Each row runs a block of the replicas, each column a block of the IPUs.

    Raises:
        OptionError: it is set to something else.
    """
    text = os.environ.get(_MESH)
    if not text:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise OptionError(
            f"{_MESH} must be the number of processes for replicas and for IPUs, such as 2x1, got "
            f"{text!r}"
        )
    return int(match[1]), int(match[2])


def launched() -> tuple[int, int]:
    """The number of this process and how many a launcher started; (0, 1) without a launcher.

    Raises:
        OptionError: a launcher's variable is no number, or its partner is missing.
    """
    for names in _LAUNCHERS:
        if not any(name in os.environ for name in names):
            continue
        rank, size = map(_number, names)
        if not 0 <= rank < size:
            raise OptionError(f"{names[0]} is {rank}, but {names[1]} is {size}")
        return rank, size
    return 0, 1


def connect(processes: int) -> bool:
    """Make the default group of this many processes, unless it is there.

    Returns:
        whether it was made.

    Raises:
        OptionError: a group of another size is there, or the launcher started another number of
            processes, or does not say where they meet.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        if (size := dist.get_world_size()) != processes:
            raise OptionError(
                f"the program needs a process group of {processes} processes, but the one that is "
                f"there has {size}"
            )
        return False
    rank, size = launched()
    if size != processes:
        raise OptionError(
            f"the program needs {processes} processes, but RANK and WORLD_SIZE (or "
            f"OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE) say {size}: start it with `torchrun "
            f"--standalone --nproc-per-node {processes} program.py`, or with poprun"
        )
    address, port = os.environ.get(_ADDRESS), os.environ.get(_PORT)
    if not address or not (port or "RANK" not in os.environ):
        missing = _PORT if address else _ADDRESS
        raise OptionError(
            f"{size} processes were started, but {missing} is not set: set it to the "
            f"{'port' if address else 'host'} where the first one waits for the others, or start "
            "the program with torchrun or poprun, which do so"
        )
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    store = _meeting(f"tcp://{host}:{port or _USUAL_PORT}", rank, size)
    # a name of its own for each group: the store keeps the addresses of groups that were ended
    own = dist.PrefixStore(f"ipu_dynamo/{next(_groups)}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    return True


@functools.cache  # the first process serves the store, as long as it lives
def _meeting(url: str, rank: int, size: int) -> Any:
    """The store through which the processes find each other."""
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous(url, rank, size))[0]


def _number(variable: str) -> int:
    """The value of a launcher's variable."""
    text = os.environ.get(variable)
    try:
        return int(text or "")
    except ValueError:
        raise OptionError(f"{variable} must be an integer, got {text!r}") from None

"""Make the mesh of the processes that run a program together."""

from typing import TYPE_CHECKING, Any

from ipu_dynamo.options.mesh import IPU, REPLICA
from ipu_dynamo.runtime.ranks.process_group import connect, mesh_of_environment
from poptorch.errors import createPoptorchError
from poptorch.options import Options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_made: "tuple[Any, DeviceMesh] | None" = None  # the last mesh, with its process group


def mesh_of(options: Options, *, training: bool, saved: bool = False) -> "DeviceMesh | None":
    """The mesh of an executor; None if this process runs its program alone.

    `Options.Distributed` says how many processes share the replicas, and IPU_DYNAMO_MESH how many
    share the IPUs of each replica. With the variable their process group is made here. An
    inference that no process group connects, or whose program is saved, runs alone.

    Raises:
        poptorch.Error: training has several processes, but no process group of them, or its
            program is a saved one.
        OptionError: IPU_DYNAMO_MESH cannot be read, or its processes cannot meet.
    """
    processes, own = options.Distributed.numProcesses, options.Distributed.processId
    asked = mesh_of_environment()
    rows, columns = asked or (processes, 1)
    if rows != processes:
        raise createPoptorchError(
            f"IPU_DYNAMO_MESH={rows}x{columns} has {rows} rows of processes, but "
            f"Options.Distributed says {processes}: start the program with poprun, and give it "
            "popdist.poptorch.Options()",
            id="option",
        )
    if rows * columns == 1 or (saved and not training and columns == 1):
        return None
    if saved:
        raise createPoptorchError(
            f"a saved program runs in one process, and this executor runs in {rows * columns}: "
            "compile it instead, and load the weights with load_state_dict",
            id="saved-program",
        )
    if asked is not None:
        connect(rows * columns)
    import torch.distributed as dist

    problem = None
    if not dist.is_initialized():
        problem = "there is no process group"
    elif dist.get_world_size() != rows * columns:
        problem = f"the process group has {dist.get_world_size()} processes"
    elif (row := dist.get_rank() // columns) != own:
        problem = f"Options.Distributed says that this is process {own}, but the group says {row}"
    if problem is None:
        return _mesh(rows, columns)
    if not training and asked is None:
        return None
    raise createPoptorchError(
        f"a program of {rows * columns} processes needs a process group, and {problem}: "
        f"call popdist.init() or torch.distributed.init_process_group('gloo'), and start the "
        f"program with `poprun --num-instances {rows} --num-replicas "
        f"{rows * options.replication_factor} python program.py`",
        id="option",
    )


def _mesh(rows: int, columns: int) -> "DeviceMesh":
    """The mesh of all processes, one for each process group: executors share its connections."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    global _made
    if _made is None or _made[0] is not dist.group.WORLD:
        shape, names = ((rows,), (REPLICA,)) if columns == 1 else ((rows, columns), (REPLICA, IPU))
        _made = dist.group.WORLD, init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _made[1]

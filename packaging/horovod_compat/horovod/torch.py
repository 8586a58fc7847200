"""Reduce, gather and broadcast tensors over the processes that a launcher started.

These are the calls of Horovod that public PopTorch programs make. They use torch.distributed's
default process group. Within `popdist.execute_on_instances` they are those of its
instances. A process without a launcher is a world of one.

Sums follow one tree by rank, so their bits are the same in every run.
"""

import enum
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ipu_dynamo.program.replica_tree import additions
from ipu_dynamo.runtime.ranks.process_group import connect, launched
from popdist import _collectives
from popdist._instances import acting_ranks

__all__ = [
    "Average",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_parameters",
    "grouped_allreduce",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "size",
]

_initialized = False
_LOCAL = {
    "rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "size": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}
_INSTEAD = {  # of names that programs of Horovod use; torch.distributed's
    "Adasum": "all_reduce",
    "DistributedOptimizer": "torch.nn.parallel.DistributedDataParallel",
    "Max": "ReduceOp.MAX",
    "Min": "ReduceOp.MIN",
    "Product": "ReduceOp.PRODUCT",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "allgather_async": "all_gather_single(..., async_op=True)",
    "allgather_object": "all_gather_object",
    "allreduce_": "all_reduce",
    "allreduce_async": "all_reduce(..., async_op=True)",
    "allreduce_async_": "all_reduce(..., async_op=True)",
    "alltoall": "all_to_all_single",
    "alltoall_async": "all_to_all_single(..., async_op=True)",
    "barrier": "barrier",
    "broadcast_": "broadcast",
    "broadcast_async": "broadcast(..., async_op=True)",
    "broadcast_async_": "broadcast(..., async_op=True)",
    "broadcast_object": "broadcast_object_list",
    "broadcast_optimizer_state": "broadcast",
    "cross_rank": "get_node_local_rank",
    "grouped_allgather": "all_gather_single",
    "grouped_allreduce_": "all_reduce",
    "is_initialized": "is_initialized",
    "join": "barrier",
    "poll": "Work.is_completed",
    "reducescatter": "reduce_scatter_single",
    "shutdown": "destroy_process_group",
    "synchronize": "Work.wait",
}


class _Op(enum.Enum):
    """How values of several processes become one."""

    AVERAGE = "Average"
    SUM = "Sum"


Average, Sum = _Op.AVERAGE, _Op.SUM


def init() -> None:
    """Make the default process group, unless it is there. Call it before all others.

    Raises:
        ValueError: a launcher started several processes and does not say where they meet.
    """
    global _initialized
    if not dist.is_initialized() and (count := launched()[1]) > 1:
        connect(count)
    _initialized = True


def rank() -> int:
    """The number of this process, from 0."""
    _require_init()
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    _require_init()
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """The number of this process among those of its host, from 0."""
    return _local("rank", alone=0)


def local_size() -> int:
    """How many processes this host has."""
    return _local("size", alone=1)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: _Op | None = None,
) -> torch.Tensor:
    """Return the mean of a tensor over all processes, or with `Sum` its sum.

    Means of whole numbers are rounded down, as Horovod's are. `name` has no effect.

    Raises:
        ValueError: the tensors differ in type or shape, or are of bool, or `average` and `op` are
            both given.
    """
    (result,) = _reduced("allreduce", [tensor], _operation(average, op))
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: _Op | None = None,
) -> list[torch.Tensor]:
    """Do for several tensors what `allreduce` does for one."""
    return _reduced("grouped_allreduce", list(tensors), _operation(average, op))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all processes, one behind the other along dim 0, by rank.

    Raises:
        ValueError: the tensors have no dimension, or differ in more than the size of dim 0.
    """
    found = _described("allgather", [tensor])
    rows = {rank: [(dtype, shape[1:])] for rank, ((dtype, shape),) in found.items() if shape}
    if len(rows) < len(found):
        raise ValueError("allgather: a tensor without dimensions has no dim 0: give it one, [x]")
    _require_equal("allgather", rows)
    parts = _collectives.gather([tensor], found)
    return torch.cat([part for (part,) in parts.values()]).to(tensor.device)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of one process. The argument stays as it is.

    Raises:
        ValueError: the tensors have different types or shapes, or `root_rank` takes no part.
    """
    (result,) = _from_root("broadcast", [tensor], root_rank)
    return result.to(tensor.device)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Write the tensors of one process over those of the others, in place.

    Args:
        params: a state dict, named parameters or parameters, or None. Values in it that are no
            tensors stay as they are; dicts, lists and tuples in it are looked through.

    Raises:
        ValueError: the tensors have different types or shapes, or `root_rank` takes no part.
    """
    own = list(_tensors(params))
    with torch.no_grad():
        for tensor, value in zip(
            own, _from_root("broadcast_parameters", own, root_rank), strict=True
        ):
            tensor.copy_(value)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of a structure, in its order; of dicts by their keys."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for key in sorted(values, key=str):
            yield from _tensors(values[key])
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes):
        for value in values:
            yield from _tensors(value)


def _operation(average: bool | None, op: _Op | None) -> _Op:
    """What `allreduce` computes."""
    if average is not None and op is not None:
        raise ValueError("allreduce: give average or op, not both; op is newer")
    if op is not None and not isinstance(op, _Op):
        raise ValueError(f"allreduce: op must be Average or Sum, got {op!r}")
    return op or (Sum if average is False else Average)


def _reduced(operation: str, tensors: list[torch.Tensor], op: _Op) -> list[torch.Tensor]:
    """The sums or means of tensors over all processes."""
    found = _described(f"{operation}, {op.value}", tensors)
    _require_equal(operation, found)
    if any(tensor.dtype == torch.bool for tensor in tensors):
        raise ValueError(f"{operation}: bool has no sums: convert the tensor, for example to int32")
    parts = list(_collectives.gather(tensors, found).values())
    for total, term in additions(len(parts)):
        for own_sum, value in zip(parts[total], parts[term], strict=True):
            own_sum.add_(value)
    results = [total.to(own.device) for total, own in zip(parts[0], tensors, strict=True)]
    if op is Sum:
        return results
    return [_divided(result, len(parts)) for result in results]


def _divided(total: torch.Tensor, count: int) -> torch.Tensor:
    """A sum divided by the number of processes, in its own type."""
    exact = total.is_floating_point() or total.is_complex()
    return total / count if exact else (total // count).to(total.dtype)


def _from_root(operation: str, tensors: list[torch.Tensor], root: int) -> list[torch.Tensor]:
    """The tensors of one process."""
    found = _described(f"{operation} from rank {root}", tensors)
    if root not in found:
        raise ValueError(f"{operation}: rank {root} is none of the processes {list(found)}")
    _require_equal(operation, found)
    return _collectives.broadcast(tensors, root, found)


def _described(
    operation: str, tensors: list[torch.Tensor]
) -> dict[int, list[_collectives.Described]]:
    """The types and shapes of the tensors of all processes."""
    _require_init()
    return _collectives.describe(operation, tensors, acting_ranks())


def _require_equal(operation: str, found: dict[int, list[_collectives.Described]]) -> None:
    """Raise if processes have different tensors."""
    first_rank, first = next(iter(found.items()))
    for rank, other in found.items():
        if len(other) != len(first):
            raise ValueError(
                f"{operation}: rank {first_rank} has {len(first)} tensors, rank {rank} {len(other)}"
            )
        for place, (one, two) in enumerate(zip(first, other, strict=True)):
            if one != two:
                raise ValueError(
                    f"{operation}: tensor {place} is {_text(one)} on rank {first_rank}, but "
                    f"{_text(two)} on rank {rank}"
                )


def _text(described: _collectives.Described) -> str:
    dtype, shape = described
    return f"{dtype.removeprefix('torch.')}{shape}"


def _local(what: str, alone: int) -> int:
    """A number of this host, as a launcher says."""
    _require_init()
    for variable in _LOCAL[what]:
        if variable in os.environ:
            return int(os.environ[variable])
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"local_{what}: the launcher did not set {_LOCAL[what][0]}")
    return alone


def _require_init() -> None:
    if not _initialized:
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def __getattr__(name: str) -> NoReturn:
    instead = _INSTEAD.get(name)
    if instead is None or not instead.startswith("torch."):
        instead = f"torch.distributed.{instead}" if instead else "torch.distributed"
    raise AttributeError(
        f"module 'horovod.torch' has no attribute {name!r}: this one comes with ipu_dynamo, for "
        f"PopTorch programs, and has only {', '.join(__all__)}. Use {instead} instead"
    )

"""Find this process's part of a program that several ranks run together."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import Options
from ipu_dynamo.options.mesh import IPU, REPLICA
from ipu_dynamo.program.share import Share
from ipu_dynamo.rank_number import name_rank_in_log
from ipu_dynamo.runtime.execute.host_io.batching import Batching, micro_batch_size
from ipu_dynamo.runtime.ranks.transport import Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ipu_dynamo.runtime.ranks.torch_transport import TorchTransport

_transports: "dict[int, tuple[ref[DeviceMesh], TorchTransport]]" = {}  # by the mesh's identity


def transport_of(options: Options) -> Transport | None:
    """Return the transport of this rank on the mesh of the options; None without a mesh.

    A compiled model has its share and its transport from here alone. All models of a mesh have one
    transport, which connects the ranks when it is first used.
    """
    mesh, share = options.mesh, share_of(options)
    if mesh is None or share is None:
        return None
    from ipu_dynamo.runtime.ranks.torch_transport import TorchTransport  # only ranks need it

    name_rank_in_log()
    known, transport = _transports.get(id(mesh), (None, None))
    if transport is None or known is None or known() is not mesh:
        transport = TorchTransport(share, numbers_of_ranks(mesh))
        _transports[id(mesh)] = ref(mesh), transport
    return transport


def numbers_of_ranks(mesh: "DeviceMesh") -> list[int]:
    """The numbers of a mesh's ranks in the default group, by their places: row by row."""
    rows = mesh.mesh.T if mesh.mesh_dim_names == (IPU, REPLICA) else mesh.mesh
    return list(rows.flatten().tolist())


def share_of(options: Options) -> Share | None:
    """The place of this rank on the mesh of the options; None without a mesh."""
    mesh = options.mesh
    if mesh is None:
        return None
    place = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    return Share(*options.grid, place.get(REPLICA, 0), place.get(IPU, 0))


def check_anchors(unsent: Collection[str], share: Share) -> None:
    """Refuse anchors on variables if a rank has a part of the IPUs.

    Args:
        unsent: anchors that are no streams of the program.

    Raises:
        CompileError: there are some.
    """
    if unsent and share.columns > 1:
        raise CompileError(
            f"anchors {', '.join(sorted(unsent))} are of variables, and a rank has those of its "
            "IPUs alone",
            hint="read weights and states after the call, or leave out the dimension ipu",
        )


def batching(options: Options, share: Share | None = None, *, training: bool) -> Batching:
    """How the tensors of a call split into micro-batches.

    Args:
        share: whose replicas the call feeds; None: it feeds all.
    """
    groups = options.input_replica_groups.of(options.replicas)
    own = groups if share is None else [groups[r] for r in share.replicas(options.replicas)]
    return Batching(
        iterations=options.device_iterations,
        accumulation=options.gradient_accumulation if training else 1,
        replicas=len(own),
        group_of=tuple(group - min(own) for group in own),
    )


def rows_of_rank(
    tensor: Tensor, options: Options | dict[str, Any], training: bool = True
) -> Tensor:
    """Take the rows that this rank passes to a call, of those that one process would pass.

    A program that loads the same data on all ranks cuts them by it. Without a mesh all rows are
    this rank's.

    Args:
        tensor: [rows, ...], an argument of a call of all replicas.
        options: of the compiled model.
        training: it is for `compile_training`; else for `compile_inference`, which has no
            gradient accumulation.

    Returns:
        A view of the rows; a copy where they are not adjacent.

    Raises:
        InputError: the rows are not those of whole micro-batches.

    Example:
        step = compile_training(model, optimizer, options)
        loss = step(rows_of_rank(x, options), rows_of_rank(y, options))
    """
    options = Options.read(options)
    share = share_of(options)
    return tensor if share is None else rows_of_share(tensor, options, share, training=training)


def rows_of_share(tensor: Tensor, options: Options, share: Share, *, training: bool) -> Tensor:
    """Take the rows of a rank's replicas; see `rows_of_rank`."""
    whole, own = (batching(options, of, training=training) for of in (None, share))
    rows = micro_batch_size("tensor", tensor.shape, whole.splits)
    if own.splits == whole.splits:
        return tensor
    first = whole.group_of[share.replicas(options.replicas)[0]]
    counts = (whole.iterations * whole.accumulation, whole.groups, rows)
    steps: Tensor = tensor.unflatten(0, counts)
    return steps.narrow(1, first, own.groups).flatten(0, 2)

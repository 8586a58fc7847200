"""Let replicas exchange tensors within `forward`.

    h = ipu_dynamo.collectives.all_gather(x, replicas=4)  # [4, *x.shape] on each replica

They work in `compile_training`, `compile_inference` and `poptorch`, on the replicas of
`Options.replicas`. Of each, the replicas of a group exchange with each other only, in ascending
order; without `groups` all replicas are one group.

Each replica has a loss of its own. The mean over replicas comes with the update. Gradients are
PopTorch's; sums have the order of a tree (`docs/replicas.md`), in the tensor's own type.

Raises:
    CompileError: with the user's line, when a program is compiled, if the program has another
        number of replicas, or the size of a tensor or group does not fit. Bodies of loops and
        branches, phased strategies and `torch.compile` have no collectives.
"""

from torch import Tensor

from ipu_dynamo.ops.library import replica_collectives as operators
from ipu_dynamo.options.replica_groups import ReplicaGroups


def all_gather(
    x: Tensor,
    replicas: int,
    *,
    groups: ReplicaGroups | None = None,
    identical_gradients: bool = False,
) -> Tensor:
    """Stack the tensors of all replicas of a group, `[replicas of a group, *x.shape]`.

    The gradient is this replica's slice of the sum of all replicas' gradients.

    Args:
        x: any type; of the same shape on every replica.
        replicas: the number of all replicas of the program.
        identical_gradients: all replicas have the same gradient, so that each takes its slice of
            its own and nothing is exchanged.
    """
    size, orthogonal = _group(groups)
    result: Tensor = operators.all_gather_op(x, replicas, size, orthogonal, identical_gradients)
    return result


def all_reduce(x: Tensor, *, groups: ReplicaGroups | None = None) -> Tensor:
    """Sum the tensors of all replicas of a group. The gradient passes unchanged.

    Args:
        x: numbers; of the same shape on every replica.
    """
    result: Tensor = operators.all_reduce_op(x, 0, *_group(groups))
    return result


def all_reduce_gradient(x: Tensor, *, groups: ReplicaGroups | None = None) -> Tensor:
    """Return `x`; its gradient is the sum of the gradients of all replicas of a group."""
    result: Tensor = operators.all_reduce_gradient_op(x, 0, *_group(groups))
    return result


def all_to_all(x: Tensor, *, groups: ReplicaGroups | None = None) -> Tensor:
    """Give replica r of a group the r-th parts of all replicas' tensors, concatenated.

    The gradient is the same exchange of gradients.

    Args:
        x: any type. The first dimension is divided into as many equal parts as the group has
            replicas.
    """
    result: Tensor = operators.all_to_all_op(x, 0, *_group(groups))
    return result


def _group(groups: ReplicaGroups | None) -> tuple[int, bool]:
    return (0, False) if groups is None else (groups.size, groups.orthogonal)

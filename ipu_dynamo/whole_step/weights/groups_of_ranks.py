"""Bring weights of groups of replicas from the ranks that run these replicas."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import Program, Variable
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks.transport import Transport


def read_groups(
    transport: Transport, program: Program, names: Collection[str], whole: Callable[[str], Tensor]
) -> None:
    """Overwrite the groups of other ranks in the tensors of variables with groups of replicas.

    The ranks of a column call it together, with the same names. Each writes its own groups only.

    Args:
        program: the whole one.
        whole: the tensor of a variable by its name, with a leading dimension over its groups.
    """
    share = transport.share
    ipus = share.ipus(program.num_ipus)
    grouped = [
        v for v in program.variables if v.name in names and v.groups is not None and v.ipu in ipus
    ]
    if share.rows == 1 or not grouped:
        return
    slices = [
        [part for v in grouped for part in _slices(v, whole(v.name), program, at)]
        for at in map(share.of_rank, share.of_column)
    ]
    parts = [part.contiguous().reshape(-1).view(torch.uint8) for part in slices[share.row]]
    with DeferredSignals(once=True), torch.no_grad():
        for row, message in enumerate(transport.gather("column", torch.cat(parts))):
            if row != share.row:
                values = message.split([part.nbytes for part in slices[row]])
                for part, value in zip(slices[row], values, strict=True):
                    part.copy_(value.clone().view(part.dtype).view(part.shape))


def _slices(variable: Variable, tensor: Tensor, program: Program, share: Share) -> list[Tensor]:
    """The parts of a variable's tensor that belong to the groups of a rank's replicas."""
    assert variable.groups is not None
    group_of = variable.groups.of(program.replicas)
    own = sorted({group_of[replica] for replica in share.replicas(program.replicas)})
    return [tensor.detach()[group] for group in own]

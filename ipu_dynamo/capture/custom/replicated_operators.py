"""Read PopTorch's custom operators by which replicas exchange tensors, as `ipu_dynamo.collectives`.

Source: `poptorch_experimental_addons.collectives`, and PopART's operators of domain ai.graphcore.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.library.replica_collectives import (
    all_gather_op,
    all_reduce_gradient_op,
    all_reduce_op,
    all_to_all_op,
)

_GROUPING = "__collectiveReplicaGrouping"
_ATTRIBUTES = {  # by operator
    "ReplicatedAllGather": {_GROUPING},
    "ReplicatedAllReduceTP": {_GROUPING, "op", "backwards"},
    "ReplicatedAllToAll": {_GROUPING},
}


def is_replicated(name: str, domain: str, version: int) -> bool:
    """Whether a custom operator exchanges tensors between replicas."""
    return domain == "ai.graphcore" and version == 1 and name in _ATTRIBUTES


def replicated_operator(
    inputs: Sequence[Tensor],
    name: str,
    examples: Sequence[Tensor] | None,
    attributes: Mapping[str, Any],
) -> list[Tensor]:
    """The result of such an operator.

    Args:
        examples: tensors with the shapes of the results; a gather takes its shape from there.

    Raises:
        CompileError: it has other inputs, or an attribute with another value, than there can be.
    """
    if len(inputs) != 1:
        raise _error(name, f"has {len(inputs)} inputs", "give it one tensor")
    if unknown := attributes.keys() - _ATTRIBUTES[name]:
        raise _error(name, f"has no attribute {min(unknown)!r}", "leave it out")
    if (op := attributes.get("op", "sum")) != "sum":
        raise _error(name, f"has op={op!r}", 'only "sum" is offered')
    if (backwards := attributes.get("backwards", 0)) not in (0, 1):
        raise _error(name, f"has backwards={backwards!r}", "it is 0 or 1")
    (x,), group = inputs, _group(name, attributes.get(_GROUPING))
    if name == "ReplicatedAllReduceTP":
        return [(all_reduce_gradient_op if backwards else all_reduce_op)(x, *group)]
    if name == "ReplicatedAllToAll":
        return [all_to_all_op(x, *group)]
    replicas, size, orthogonal = group
    if not examples or (x.numel() == 0 and not replicas):
        hint = "give example_outputs, and for a tensor without elements its grouping"
        raise _error(name, "does not say how many replicas there are", hint)
    like = examples[0]
    members = size or replicas or like.numel() // x.numel()
    if like.numel() != members * x.numel():
        raise _error(
            name,
            f"gathers {members} tensors of shape {list(x.shape)}, and example_outputs has shape "
            f"{list(like.shape)}",
            "give the example as many elements",
        )
    result: Tensor = all_gather_op(x, replicas or members, size, orthogonal, True)
    return [result.reshape(like.shape)]


def _group(name: str, grouping: Any) -> tuple[int, int, bool]:
    """The number of replicas, the size of a group, and whether groups are strided; 0: not said."""
    if grouping is None:
        return 0, 0, False
    numbers = list(grouping)
    if len(numbers) != 3 or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise _error(name, f"has {_GROUPING}={numbers}", "give [replicas, stride, size of a group]")
    replicas, stride, size = numbers
    if size in (1, replicas):
        return replicas, size, False
    if replicas % size or stride not in (1, replicas // size):
        raise _error(
            name,
            f"has groups of {size} of {replicas} replicas with stride {stride}",
            "groups are of consecutive replicas (stride 1), or orthogonal to these (stride "
            "replicas / size), and their size divides the replicas",
        )
    return replicas, size, stride != 1


def _error(name: str, problem: str, hint: str) -> CompileError:
    return CompileError(
        f"custom operator ai.graphcore.{name}, version 1, {problem}",
        where=called_from(),
        hint=hint,
        id="collective",
    )

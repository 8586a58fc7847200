"""Define operators by which replicas exchange tensors within a micro-batch.

Passes cut functions at these operators, so that functions stay pure, and replace each one by an
instruction `Collective`. Outside of a program the operators raise an error.

Each names its group by three arguments: `replicas` is the number of all replicas, and 0 if the
caller does not know it; `size` is the number of replicas in a group, and 0 for one group of all;
`orthogonal` groups are strided, see `ReplicaGroups`.

Source: PopTorch's gradients. Each replica has a loss of its own; a mean over replicas comes with
the update. The gradient of a sum is the identity, which is right if all replicas compute the same
loss from it.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import CompileError

_library = torch.library.Library("ipu", "FRAGMENT")
_GROUP = "int replicas, int size, bool orthogonal"
_library.define(f"all_gather(Tensor x, {_GROUP}, bool identical_gradients) -> Tensor")
for _name in ("all_reduce", "all_reduce_gradient", "all_to_all"):
    _library.define(f"{_name}(Tensor x, {_GROUP}) -> Tensor")


def _outside(x: Tensor, *_: Any) -> Tensor:
    raise CompileError(
        "replicas exchange tensors only within a program",
        hint="compile the model with ipu_dynamo.compile_training or compile_inference, or as a "
        "model of poptorch",
        id="collective",
    )


def _gathered_shape(x: Tensor, replicas: int, size: int, orthogonal: bool, _: bool) -> Tensor:
    return x.new_empty((size or replicas, *x.shape))


def _same_shape(x: Tensor, replicas: int, size: int, orthogonal: bool) -> Tensor:
    return x.new_empty(x.shape)


def _summed_shape(x: Tensor, replicas: int, size: int, orthogonal: bool) -> Tensor:
    if x.dtype == torch.bool:
        raise CompileError(
            "replicas cannot sum truth values",
            hint="convert the tensor to numbers first",
            id="collective",
        )
    return x.new_empty(x.shape)


for _name, _shape in (
    ("all_gather", _gathered_shape),
    ("all_reduce", _summed_shape),
    ("all_reduce_gradient", _summed_shape),
    ("all_to_all", _same_shape),
):
    _library.impl(_name, _outside, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipu::{_name}", _shape, lib=_library)

all_gather_op = torch.ops.ipu.all_gather.default
all_reduce_op = torch.ops.ipu.all_reduce.default
all_reduce_gradient_op = torch.ops.ipu.all_reduce_gradient.default
all_to_all_op = torch.ops.ipu.all_to_all.default
COLLECTIVES = (all_gather_op, all_reduce_op, all_to_all_op)  # those that exchange anything


class Exchanged(NamedTuple):
    """The tensor that a collective of a graph exchanges, and its group of replicas."""

    x: fx.Node
    replicas: int
    size: int
    orthogonal: bool

    @classmethod
    def of(cls, node: fx.Node) -> Self:
        """Read the arguments of a node."""
        return cls(*node.args[:4])  # type: ignore[arg-type]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1:]


def _of_gather(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    replicas, size, orthogonal, identical = ctx.group
    if not identical:
        gradient = all_reduce_op(gradient, replicas, size, orthogonal)
    index = torch.ops.ipu.replica_index()
    if size:
        index = index // (replicas // size) if orthogonal else index % size
    return gradient.index_select(0, index.reshape(1)).squeeze(0), None, None, None, None


def _of_sum(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradient, None, None, None


def _of_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return all_reduce_op(gradient, *ctx.group), None, None, None


def _of_exchange(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return all_to_all_op(gradient, *ctx.group), None, None, None


for _name, _gradient in (
    ("all_gather", _of_gather),
    ("all_reduce", _of_sum),
    ("all_reduce_gradient", _of_gradient),
    ("all_to_all", _of_exchange),
):
    torch.library.register_autograd(f"ipu::{_name}", _gradient, setup_context=_keep, lib=_library)

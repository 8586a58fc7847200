"""Let models say how much memory an operator may use for temporary values on an IPU.

`ipu::set_available_memory` is the mark. It exists until the pass `TagConvolutionGroups` reads it.
"""

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ipu_dynamo.errors import OptionError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.serialized import serialized_matmul_op
from ipu_dynamo.ops.recurrent.pairs import RECURRENT

# Convolutions of forward, before and after autograd
CONVOLUTIONS = {
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.convolution.default,
}
# Operators that an IPU plans by the memory that they may use, before and after autograd
PLANNED = (
    RECURRENT
    | CONVOLUTIONS
    | {
        serialized_matmul_op,
        aten.addbmm.default,
        aten.addmm.default,
        aten.addmv.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution_backward.default,
        aten.dot.default,
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_add.default,
        aten.index_put.default,
        aten.index_select.default,
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
        aten.mv.default,
        aten.scatter.src,
        aten.scatter_add.default,
    }
)
_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("set_available_memory(Tensor x, float share) -> ()")


def _mark(x: Tensor, share: float) -> None:
    """Mark a value; a marker computes nothing."""


_library.impl("set_available_memory", _mark, "CompositeExplicitAutograd")
_library.impl("set_available_memory", _mark, "Meta")
set_available_memory_op = torch.ops.ipu.set_available_memory.default
has_side_effect(set_available_memory_op)


def set_available_memory(x: Tensor, share: float) -> Tensor:
    """Give the operator that makes `x`, and its gradients, a share of an IPU's memory of its own.

    That is a matrix product, convolution, recurrent layer, gather or scatter: the one that makes
    `x`, or the nearest one of at most two operators before it. Without one it has no effect. The
    share is in the program's text, for a model of an IPU's memory and cycles, and changes no
    result. It does nothing outside a program, through `torch.compile`, and in the body of a loop or
    branch.

    Args:
        x: any tensor, which is returned.
        share: from 0 to 1, in place of `Options(memory_proportion=...)`.

    Raises:
        OptionError: the share is not a number from 0 to 1.

    Source: PopTorch user guide, "poptorch.set_available_memory".
    """
    share = checked_share(share)
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        torch.ops.ipu.set_available_memory(x, share)
    return x


def checked_share(share: float) -> float:
    """Return a share of an IPU's memory.

    Raises:
        OptionError: no number from 0 to 1.
    """
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 <= share <= 1:
        raise OptionError(f"a share of an IPU's memory is {share!r}; it is a number from 0 to 1")
    return float(share)

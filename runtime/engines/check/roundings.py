"""Move the results of operators as far as the roundings of another right computation may.

An operator that rounds each element once moves it by a unit in the last place. A sum rounds once
for each of its terms, and its error depends on their order:

- If terms cancel, an error of some `eps * sum(|terms|)` is far more than a unit in the last place
  of the result. The gradient of a bias before a batch norm is such a sum: all of it is rounding.
- If many equal terms are added one after the other, as in a compiler's loop, all roundings go in
  one direction. A sum of 4096 times 0.1 is then off by 300 units. PyTorch adds in pairs.

So a sum is computed one term after the other, and moves by `eps` of the sum of its terms' sizes.
The operator itself computes that sum, from the sizes of its arguments. Norms, softmaxes, losses and
their gradients have sums inside. They get the values of the operators that Inductor makes of them.
So an error of their sum reaches all elements in the same way.

Source   N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 4.2;
         `CascadeSumHelper` in Inductor's C++.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.dispatch_mode import TorchDispatchMode
from ipu_dynamo.ops.private.graphs import OpOverload, schema_of
from ipu_dynamo.ops.private.native import decomposition_of
from ipu_dynamo.runtime.engines.check import limits
from ipu_dynamo.runtime.engines.check.classes import call_rounds, operator_name, tensors_in
from ipu_dynamo.runtime.engines.check.judge import slices_of

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_SUMS = frozenset(  # each result is a sum of products of one element of each floating argument
    {"sum", "mean", "nansum", "cumsum", "trace", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv"}
    | {"addbmm", "baddbmm", "convolution", "convolution_backward", "embedding_dense_backward"}
    | {"index_add", "scatter_add", "index_put", "_index_put_impl", "avg_pool2d", "avg_pool3d"}
    | {"_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "accumulate_matmul", "accumulate_rows"}
)
_HAVE_SUMS = frozenset(
    {"_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_layer_norm"}
    | {"native_batch_norm_backward", "batch_norm_backward", "native_layer_norm_backward"}
    | {"native_group_norm", "native_group_norm_backward", "_fused_rms_norm", "var_mean"}
    | {"_fused_rms_norm_backward", "std_mean", "_softmax", "_log_softmax", "linalg_vector_norm"}
    | {"_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_forward", "mse_loss"}
    | {"nll_loss2d_forward", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}
    | {"binary_cross_entropy_with_logits", "soft_margin_loss"}
)


class Roundings(TorchDispatchMode):
    """Roundings of one computation.

    Args:
        number: computations of one number are equal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator("cpu").manual_seed(number)

    def call(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator, and move its results, or the argument to which it adds in place."""
        name = operator_name(operator)
        sizes = _sizes(operator, args, kwargs) if name in _SUMS else []
        made = operator(*args, **kwargs)
        if name in _HAVE_SUMS and (inner := _operators_of(operator, args)) is not None:
            with self:
                through = inner(*args, **kwargs)
            for own, other in zip(tensors_in(made), tensors_in(through), strict=True):
                own.copy_(other)  # its type and layout stay
        elif name in ("sum", "mean"):
            _add_one_by_one(made, args, kwargs, mean=name == "mean")
        elif name == "convolution_backward" and isinstance(made[2], Tensor):
            made[2].copy_(self.call(aten.sum.dim_IntList, *_of_bias(args[0])))
        moved = tensors_in(made)
        if not call_rounds(operator, args, moved):
            in_place = bool(name) and name.startswith("accumulate")
            moved = tensors_in(args[0]) if in_place and schema_of(operator).is_mutable else []
        self.move(moved, sizes)
        return made

    def move(self, tensors: Sequence[Tensor], sizes: Sequence[Tensor] = ()) -> None:
        """Move tensors in place.

        Args:
            sizes: of sums: for each tensor, the sums of its terms' sizes.
        """
        for tensor, size in zip(tensors, sizes, strict=False):
            _move_sums(tensor, size, self._generator)
        for tensor in tensors:
            _move_by_units(tensor, self._generator)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.call(func, args, kwargs or {})


def _operators_of(operator: OpOverload, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The operators that PyTorch's compiler makes of an operator, as a function; None: it stays."""
    empty = any(isinstance(value, Tensor) and not value.numel() for value in args[:1])
    return None if empty or schema_of(operator).is_mutable else decomposition_of(operator)


def _of_bias(gradient: Tensor) -> tuple[tuple[Tensor, list[int]], dict[str, Any]]:
    """The arguments of the sum that is the gradient of a convolution's bias."""
    return (gradient, [0, *range(2, gradient.dim())]), {}


def _add_one_by_one(
    made: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], *, mean: bool
) -> None:
    """Make a sum or mean that of a loop over terms, of which several lanes run side by side."""
    x: Tensor = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    summed = {d % x.dim() for d in dims} if dims else {*range(x.dim())}
    if not x.dtype.is_floating_point or not made.dtype.is_floating_point or not made.numel():
        return
    count = x.numel() // made.numel()
    if count < 2:
        return
    kept = [d for d in range(x.dim()) if d not in summed]
    rows = x.to(torch.promote_types(made.dtype, torch.float32))
    rows = rows.permute(*sorted(summed), *kept).reshape(count, -1).contiguous()
    length = min(count, limits.ONE_BY_ONE)
    lanes, whole = count // length, count // length * length
    loop = rows[:whole].reshape(length, -1).numpy()
    # One column would be added in pairs.
    total = np.add.reduce(loop, 0) if loop.shape[1] > 1 else np.add.accumulate(loop, 0)[-1]
    result = torch.from_numpy(total).view(lanes, -1).sum(0) + rows[whole:].sum(0)
    made.copy_((result / count if mean else result).view(made.shape))


def _sizes(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The sums of the sizes of the terms: of each result, or of the argument written in place."""
    if any(t.dtype.is_complex for t in tensors_in(list(args))):
        return []
    factors = {name: abs(kwargs[name]) for name in ("alpha", "beta") if name in kwargs}
    sized = map_aggregate(tuple(args), _size)
    made = operator(*sized, **{**kwargs, **factors})
    return tensors_in(sized[0] if schema_of(operator).is_mutable else made)


def _size(value: Any) -> Any:
    is_floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    return value.abs() if is_floating else value


def _move_sums(tensor: Tensor, sizes: Tensor, generator: torch.Generator) -> None:
    """Move each element by -1, 0 or 1 times `OF_TERMS * eps` of its terms' sizes."""
    if not tensor.dtype.is_floating_point or not _may_be_moved(tensor):
        return
    wide = torch.promote_types(tensor.dtype, torch.float32)  # sums of halves are in float32
    for part, size in slices_of(tensor, sizes):
        steps = torch.randint(-1, 2, part.shape, generator=generator, dtype=torch.int8)
        by = size.to(wide) * (limits.OF_TERMS * torch.finfo(wide).eps * steps)
        part.copy_(torch.where(part.isfinite() & by.isfinite(), part + by, part))


def _move_by_units(tensor: Tensor, generator: torch.Generator) -> None:
    """Move each element by -1, 0 or 1 unit in the last place; zeros stay."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    if not tensor.dtype.is_floating_point or not _may_be_moved(tensor):
        return
    for (part,) in slices_of(tensor):
        steps = torch.randint(-1, 2, part.shape, generator=generator, dtype=torch.int8)
        steps *= (part != 0) & part.isfinite()
        # One more is the next number away from zero.
        part.view(_BITS[part.dtype.itemsize]).add_(steps)


def _may_be_moved(tensor: Tensor) -> bool:
    """Whether each element has a place of its own, and more than a byte."""
    return tensor.dtype.itemsize > 1 and bool(tensor.numel()) and 0 not in tensor.stride()

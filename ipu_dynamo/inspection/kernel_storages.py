"""Say what PyTorch's kernels allocate for results, where stand-ins of tensors differ."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import pytree, schema_of

# Losses that PyTorch's kernels sum up in the memory of their elements, which the result keeps.
_SUMMED_IN_PLACE = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}
# Operators that copy the whole storage of their first argument, whatever part that is of it.
_COPIES_STORAGE = {
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}


def made_by(operator: Any, args: Sequence[Any], results: Any) -> Iterator[Tensor]:
    """The results that a kernel makes: without those that a mask in its arguments leaves out."""
    names = [argument.name for argument in schema_of(operator).arguments]
    if "output_mask" in names[: len(args)]:
        mask = args[names.index("output_mask")]
        results = [result for result, wanted in zip(results, mask, strict=True) if wanted]
    for result in pytree.tree_leaves(results):
        if isinstance(result, Tensor):
            yield result


def nbytes_of(operator: Any, args: Sequence[Any]) -> int | None:
    """The bytes of the storage of a kernel's result; None: those of its stand-in."""
    if operator in _SUMMED_IN_PLACE:
        return int(args[0].nbytes)
    if operator in _COPIES_STORAGE and 0 not in args[0].stride():  # one that overlaps is made dense
        return int(args[0].untyped_storage().nbytes())
    return None

"""Let a traced model compute losses for which torch decides by values, and mark losses.

`gaussian_nll_loss` raises for negative variances, and the largest value decides how long the result
of `bincount` is. In a program that is a check, which raises when the program runs.

Training minimises the value of the loss. Most losses of torch are an operator, which the pass
`IdentityLoss` knows. Others end in several operators: `kl_div` with `batchmean` is a sum and a
division, `mse_loss` with weights a product and a sum. Their results are marked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.markers import identity_loss
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced


class CheckedLosses(TorchFunctionMode):
    """While entered, such values are checked by the program, and such losses are marked.

    Args:
        training: whether losses of several operators are marked.
    """

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self._training = training

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.bincount, Tensor.bincount):
            return _counted(*args, **kwargs)
        if func is not F.gaussian_nll_loss:
            result = func(*args, **kwargs)
            marked = self._training and _is_composed(func, kwargs)
            return identity_loss(result, "none") if marked else result
        check = in_this_thread(_checked, torch.any)
        with replaced(torch, "any", check):
            result = func(*args, **kwargs)
        return identity_loss(result, "none")


def _is_composed(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a loss is more than one operator.

    Torch gives all arguments but the tensors by name, in whichever way the user called it.
    """
    batch_mean = func is F.kl_div and kwargs.get("reduction") == "batchmean"
    return batch_mean or (func is F.mse_loss and kwargs.get("weight") is not None)


def _checked(is_negative: Tensor) -> bool:
    """Whether any number is: no, which the program checks."""
    aten._assert_async.msg(is_negative.any().logical_not(), "var has negative entry/entries")
    return False


def _counted(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each value below `minlength` is there; the program checks that no other one is."""
    if not minlength:
        raise CompileError(
            "the shape of what bincount returns depends on the values of its input, which is not "
            "known when compiling",
            where=called_from(),
            hint="bincount(x, minlength=n), where all values are below n",
            id="value",
        )
    known = ((input >= 0) & (input < minlength)).all()
    aten._assert_async.msg(known, f"bincount has a value that is not below minlength={minlength}")
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    amounts = torch.ones_like(input) if weights is None else weights
    counts = torch.zeros(minlength, dtype=dtype, device=input.device)
    return counts.index_add(0, input.long(), amounts.to(dtype))

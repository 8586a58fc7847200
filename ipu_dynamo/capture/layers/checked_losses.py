"""Let a traced model compute losses of torch that look at values first.

`gaussian_nll_loss` raises for negative variances. In a program that is a check, which raises when
the program runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ipu_dynamo.ops.marks.markers import identity_loss
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

aten = torch.ops.aten


class CheckedLosses(TorchFunctionMode):
    """While entered, such losses are checked by the program, and marked as torch's others are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.gaussian_nll_loss:
            return func(*args, **(kwargs or {}))
        check = in_this_thread(_checked, torch.any)
        with replaced(torch, "any", check):
            result = func(*args, **(kwargs or {}))
        return identity_loss(result, "none")


def _checked(is_negative: Tensor) -> bool:
    """Whether any number is: no, which the program checks."""
    aten._assert_async.msg(is_negative.any().logical_not(), "var has negative entry/entries")
    return False

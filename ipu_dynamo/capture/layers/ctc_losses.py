"""Let a traced model compute CTC losses by an operator that programs have.

PyTorch's own operator reads its lengths while it is traced, and the shape of the tensor that it
saves for backward depends on them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ipu_dynamo.ops.library.ctc_loss import ctc_loss
from ipu_dynamo.ops.marks.markers import identity_loss

_NAMES = (
    "log_probs",
    "targets",
    "input_lengths",
    "target_lengths",
    "blank",
    "reduction",
    "zero_infinity",
)
_REDUCTIONS = ("none", "mean", "sum")  # as PyTorch's operators number them


class CtcLosses(TorchFunctionMode):
    """While entered, CTC losses are computed by `ctc_loss`, and marked as torch's losses are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in (F.ctc_loss, torch.ctc_loss):
            return func(*args, **(kwargs or {}))
        named = {**dict(zip(_NAMES, args, strict=False)), **(kwargs or {})}
        if isinstance(number := named.get("reduction"), int):
            named["reduction"] = _REDUCTIONS[number]
        return identity_loss(ctc_loss(**named), "none")

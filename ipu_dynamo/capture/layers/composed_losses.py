"""Mark the value of torch losses that are more than one operator.

What training minimises is the value that the user's loss has. Most losses of torch are an operator,
which the pass `IdentityLoss` knows; these end in others: `kl_div` with `batchmean` is a sum and a
division, `mse_loss` with weights a product and a sum.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ipu_dynamo.ops.marks.markers import identity_loss


class ComposedLosses(TorchFunctionMode):
    """While entered, results of such losses are marked."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # torch gives all but the tensors by name, however the user called it
        batch_mean = func is F.kl_div and kwargs.get("reduction") == "batchmean"
        weighted = func is F.mse_loss and kwargs.get("weight") is not None
        return identity_loss(result, "none") if batch_mean or weighted else result

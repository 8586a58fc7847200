"""Let `torch.inference_mode` in a traced model switch gradients off, as `torch.no_grad` does.

A trace records the switch of gradients, but not that of inference mode.

Call     with torch.inference_mode(): h = teacher(x)
Recorded torch._C._set_grad_enabled(False); %h = ...; torch._C._set_grad_enabled(True)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

_switch = torch._C._set_grad_enabled


@contextmanager
def inference_regions_recorded() -> Iterator[None]:
    """Within the context and this thread, record regions in inference mode by their gradients."""
    kind, regions = torch.inference_mode, list[tuple[bool, bool]]()

    class Ungraded(TorchFunctionMode):
        """Keep `torch.enable_grad` from acting in a region, as in eager PyTorch."""

        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if func is _switch and regions and regions[-1][0]:
                args = (False,)
            return func(*args, **(kwargs or {}))

    def enter(region: torch.inference_mode) -> None:
        regions.append((region.mode, torch.is_grad_enabled()))
        _switch(not region.mode)

    def leave(region: torch.inference_mode, *error: Any) -> None:
        _, before = regions.pop()
        _switch(before)

    with (
        replaced(kind, "__enter__", in_this_thread(enter, kind.__enter__)),
        replaced(kind, "__exit__", in_this_thread(leave, kind.__exit__)),
        Ungraded(),
    ):
        yield

"""Keep the caller's autocast from casting again what a trace has recorded with its casts.

A model may switch autocast off for a part of itself. In the graph that part is an operator without
casts, which autocast would take for one that wants them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from ipu_dynamo.ops.private.native import any_autocast_enabled

_DEVICES = ("cpu", "cuda")
_NOTHING = nullcontext()


def recorded_casts_only() -> AbstractContextManager[object]:
    """Switch autocast off, where it is on: that takes microseconds."""
    if not any_autocast_enabled():
        return _NOTHING
    return _switched_off()


@contextmanager
def _switched_off() -> Iterator[None]:
    """Autocast off; an interrupt at any time leaves it as the caller has it."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield

"""Keep the caller's autocast from casting again what a trace has recorded with its casts.

A model may switch autocast off for a part of itself. In the graph that part is an operator without
casts, which autocast would take for one that wants them.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from ipu_dynamo.ops.private.native import any_autocast_enabled

_DEVICES = ("cpu", "cuda")
_NOTHING = nullcontext()


def recorded_casts_only() -> AbstractContextManager[object]:
    """Switch autocast off, where it is on: that takes microseconds."""
    if not any_autocast_enabled():
        return _NOTHING
    stack = ExitStack()
    for device in _DEVICES:
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack

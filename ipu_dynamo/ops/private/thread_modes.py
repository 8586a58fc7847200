"""Leave a thread's modes as they were: gradients and autocast. An interrupt changes nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

_DEVICES = ("cpu", "cuda")
_NOTHING = nullcontext()


class KeptGradMode:
    """A block around one of `torch.no_grad()`.

    If a signal's handler raises right after `no_grad` has switched gradients off, or before they
    are on again, they stay off. One signal cannot keep both blocks from restoring them.
    """

    def __init__(self) -> None:
        self._before = torch.is_grad_enabled()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        torch.set_grad_enabled(self._before)


def recorded_casts_only() -> AbstractContextManager[object]:
    """Switch the caller's autocast off: a trace has recorded the casts already.

    A model may switch autocast off for a part of itself. In the graph that part is an operator
    without casts, to which autocast would add some. Switching it off takes microseconds, so that
    is done only if it is on.
    """
    if not torch._C._is_any_autocast_enabled():
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

"""Leave a thread's grad mode as it was, also where a signal's handler raises while it changes."""

import torch


class KeptGradMode:
    """A block around one of `torch.no_grad()`.

    That alone leaves gradients off where a handler raises behind the line that switches them off,
    or before they are on again at its end. One signal cannot keep both blocks from switching back.
    """

    def __init__(self) -> None:
        self._before = torch.is_grad_enabled()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        torch.set_grad_enabled(self._before)

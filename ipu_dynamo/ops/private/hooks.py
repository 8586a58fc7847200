"""Find the hooks that users have registered: PyTorch has no public way. Checked on 2.13.0."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def has_gradient_hooks(tensor: Tensor | None) -> bool:
    """Whether hooks on a tensor wait for its gradient."""
    hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
    return any(getattr(tensor, name, None) for name in hooks)


def step_hooks(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the hooks of an optimiser's step. It may lack the attributes of its base class."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        yield from (getattr(optimizer, name, None) or {}).values()

"""Define the operators of gradients that a model takes, or changes, in forward.

    take_gradients(results, inputs, unread, tangents, retain, create)   torch.autograd.grad
    require_gradient(x, required)                                       x.requires_grad_(required)
    hook(x, captured, handle)                                           x.register_hook(function)

They exist between tracing and `Differentiate`, where autograd runs: it computes the first, and acts
on the others.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ipu_dynamo.ops.private.autograd_engine import run_engine, set_requires_grad

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "take_gradients(Tensor[] results, Tensor[] inputs, Tensor[] unread, Tensor?[] tangents, "
    "bool retain, bool create) -> Tensor[]"
)
_library.define("require_gradient(Tensor x, bool required) -> ()")
_library.define("hook(Tensor x, Tensor[] captured, int handle) -> ()")

HOOK = "ipu.hook"  # key of the meta of `hook`: the graph of its function
hook_handles = itertools.count()


def _take_gradients(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    unread: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    retain: bool,
    create: bool,
) -> list[Tensor]:
    gradients = run_engine(results, [*inputs, *unread], tangents, retain=retain, create=create)
    return [gradient for gradient in gradients if gradient is not None]


def _require_gradient(x: Tensor, required: bool) -> None:
    set_requires_grad(x, required)


def _hook(x: Tensor, captured: Sequence[Tensor], handle: int) -> None:
    """Mark a hook, which acts when autograd runs."""


_library.impl("take_gradients", _take_gradients, "CompositeImplicitAutograd")
_library.impl("require_gradient", _require_gradient, "CompositeImplicitAutograd")
_library.impl("hook", _hook, "CompositeImplicitAutograd")

take_gradients_op = torch.ops.ipu.take_gradients.default
require_gradient_op = torch.ops.ipu.require_gradient.default
hook_op = torch.ops.ipu.hook.default
has_side_effect(require_gradient_op)
has_side_effect(hook_op)

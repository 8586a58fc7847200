"""Keep the results of a layer for the backward pass if other values are recomputed."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ipu_dynamo.ops.marks import markers


class CheckpointOutputs:
    """A forward hook that marks each tensor which a module returns, alone or in a tuple."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, Tensor):
                markers.recomputation_checkpoint(value)


def recomputation_checkpoint(module: nn.Module) -> RemovableHandle:
    """Keep the results of `module` for the backward pass if other values are recomputed.

    Values and gradients do not change.

    Args:
        module: whose results are kept.

    Returns:
        a handle; its `remove` undoes it.
    """
    return module.register_forward_hook(CheckpointOutputs())

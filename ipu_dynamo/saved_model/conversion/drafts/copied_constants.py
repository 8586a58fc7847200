"""Tell which constants are copied to every IPU that reads them.

A parameter has one owner: stages that read it are on one IPU. A constant of the computation, such
as the epsilon that several layers share, never changes, so several IPUs may have it.
"""

from torch import Tensor, fx

CONSTANT = "ipu_constant"  # key of a placeholder's meta: it holds no parameter and no saved buffer
MOST_COPIED_BYTES = 1 << 16
"""A decision of this project: a tenth of the memory of one of the 1,472 tiles of a Mk2 IPU, so that
copies do not decide what fits. A larger constant is placed as a parameter is."""


def is_copied(placeholder: fx.Node, tensor: Tensor) -> bool:
    """Whether several IPUs may each have `tensor`."""
    small = tensor.numel() * tensor.element_size() <= MOST_COPIED_BYTES
    return small and bool(placeholder.meta.get(CONSTANT))

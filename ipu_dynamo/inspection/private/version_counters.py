"""Take back what PyTorch counts as writes to tensors. Checked on PyTorch 2.13.0."""

from collections.abc import Mapping

from torch import Tensor
from torch._C._autograd import _unsafe_set_version_counter


def set_versions(versions: Mapping[Tensor, int]) -> None:
    """Let tensors have been written so often. Their values have to be those of then."""
    _unsafe_set_version_counter((*versions,), (*versions.values(),))

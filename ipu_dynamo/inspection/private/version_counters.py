"""Take back what PyTorch counts as writes to tensors. Checked on PyTorch 2.13.0.

PyTorch 2.14.1 declares the same function, which was not run there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError

try:
    from torch._C._autograd import _unsafe_set_version_counter
except ImportError:
    _unsafe_set_version_counter = None  # type: ignore[assignment]


def check_versions_can_be_set() -> None:
    """Refuse a PyTorch whose counters cannot be set.

    Raises:
        IpuError: it has no function for that.
    """
    if _unsafe_set_version_counter is None:
        raise IpuError(
            f"PyTorch {torch.__version__} cannot take back writes to tensors, so a backward pass "
            "that is to come would fail after explain\n"
            "  try:  call the model, then ipu_dynamo.inspect"
        )


def set_versions(versions: Mapping[Tensor, int]) -> None:
    """Let tensors have been written so often. Their values have to be those of then.

    Raises:
        IpuError: PyTorch cannot do it, or has not done it.
    """
    check_versions_can_be_set()
    _unsafe_set_version_counter((*versions,), (*versions.values(),))
    if any(tensor._version != version for tensor, version in versions.items()):
        raise IpuError(f"PyTorch {torch.__version__} has not taken back writes to tensors")

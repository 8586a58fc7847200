"""Hold the uses that this folder makes of PyTorch's private names. Checked on PyTorch 2.13.0."""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

__all__ = ["FakeTensor", "FakeTensorMode", "pytree"]

"""Give the mode that sees each operator, which PyTorch documents and keeps in a private module."""

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

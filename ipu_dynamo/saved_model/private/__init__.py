"""Wrap PyTorch's private names about exported programs. Checked on PyTorch 2.13.0."""

"""Use what PyTorch keeps private about exported programs. Checked on PyTorch 2.13.0."""

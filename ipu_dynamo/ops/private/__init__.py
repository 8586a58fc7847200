"""Hold the private names of PyTorch that graphs and operators need, to go through for a release."""

"""Hold the private names of PyTorch that capture needs, to go through for a new release."""

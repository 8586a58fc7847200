"""Hold the private names of PyTorch that the drawn models and comparisons need."""

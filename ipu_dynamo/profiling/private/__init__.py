"""Hold the private names of PyTorch's profiler."""

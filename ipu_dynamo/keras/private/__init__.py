"""Hold the private names of Keras that the package uses, and those of PyTorch for its scope."""

"""Hold every private name of Keras that the package uses, and those of PyTorch that its scope needs."""

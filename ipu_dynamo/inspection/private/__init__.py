"""Private names of PyTorch that looking at compiled models needs."""

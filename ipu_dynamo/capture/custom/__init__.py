"""Record what users define themselves: autograd functions, custom operators, calls of the host.

Gradients that a model takes in forward and hooks on its tensors are among them.
"""

"""Be the backend of `torch.compile`: the first front end.

A graph of Dynamo goes in; AOTAutograd splits it, and each half becomes a program of its own that
keeps PyTorch's random generator, in eager order.
"""

"""Keep the state of a training step in a folder, and take it over again.

A checkpoint holds whole tensors with PyTorch's names, and no program: the script makes the step
again. It is complete or not there, and is checked before anything of it is used.
"""

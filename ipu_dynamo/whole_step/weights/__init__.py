"""Copy weights and optimiser states from a model to its program, and back.

The first values of a program have the program's shapes and types. A model's own tensors are written
only when they are exchanged.
"""

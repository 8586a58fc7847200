"""Bring weights and optimiser states from a model to its program, and home again.

What a program begins with has the program's shapes and types; a model's own tensors are written
only where they are exchanged.
"""

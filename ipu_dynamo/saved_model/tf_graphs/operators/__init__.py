"""Compute TensorFlow's operators with PyTorch's: one registered function for each.

Sizes are Python integers wherever the graph computes them from shapes, so that no tensor is read
to know a shape. Modules here register their functions; `registry.py` finds them by name.
"""

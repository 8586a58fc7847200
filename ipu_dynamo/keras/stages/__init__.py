"""Assign the invocations of layers to pipeline stages, and check, show and plan what results.

What a model's graph is (`layer_graph.py`) is read from Keras' nodes; nothing here computes.
"""

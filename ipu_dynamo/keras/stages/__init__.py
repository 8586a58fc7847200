"""Assign the calls of layers to pipeline stages; check, show and plan the assignment.

A model's graph (`layer_graph.py`) is read from Keras' nodes; nothing here computes.
"""

"""Compute embeddings and projections in parts, and put such layers in place of plain ones.

Parts give the results of the plain layer, up to the order of sums. Weights are restored unchanged.
"""

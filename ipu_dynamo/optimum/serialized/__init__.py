"""Compute embeddings and projections in parts, and put such layers in place of plain ones.

A part computes what the plain layer does, up to the order of sums; weights go back unchanged.
"""

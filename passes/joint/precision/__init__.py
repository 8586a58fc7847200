"""Compute in half precision as an IPU does: partial sums, rounding, exceptions.

Shapes and types of results stay; only how they are rounded, or whether a program stops, changes.
"""

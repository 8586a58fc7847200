"""Choose values that forward passes keep for backward passes, and compute the others again.

A rematerialised value equals the first one to the last bit.
"""

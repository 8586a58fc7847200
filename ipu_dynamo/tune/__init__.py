"""Measure this machine once, keep the answer, and estimate what was not measured.

Microbenchmarks, the cache of their figures, named costs. No pass above the host passes reads it, so
that a program is the same on every machine.
"""

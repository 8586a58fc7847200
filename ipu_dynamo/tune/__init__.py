"""Measure this machine once, keep the figures, and estimate those not measured.

Microbenchmarks, the cache of their figures, named costs. No pass above the host passes reads it, so
that a program is the same on every machine.
"""

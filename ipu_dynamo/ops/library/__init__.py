"""Operators that PopTorch's programs call by name: each is one node of a program.

Their kernels look at values, so that no compiler sees into them. Facts are from Graphcore's
published documentation and the programs that use them.
"""

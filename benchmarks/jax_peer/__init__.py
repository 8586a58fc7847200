"""Hold JAX as a contender: the same weights, work and numbers, compiled as a whole by XLA.

JAX is an extra of the benchmarks (`pip install 'ipu_dynamo[bench]'`); without it there is no such
contender.
"""

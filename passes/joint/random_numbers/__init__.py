"""Draw random numbers by key and counter.

From here on no operator of the graph reads a generator, so numbers depend on nothing but the seed
and where in the model they are drawn.
"""

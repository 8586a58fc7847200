"""Define operators in which half precision rounds as the machine does, and checks of floats.

They repeat an IPU's arithmetic, which a CPU does not have: sums of products in half precision, and
rounding at random.
"""

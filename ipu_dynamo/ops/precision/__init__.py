"""Define operators in which half precision rounds as the machine does, and checks of floats.

They stand for what an IPU computes and a CPU would not: sums of products in half, rounding at
random.
"""

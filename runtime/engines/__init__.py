"""Turn functions into callables: compiled by Inductor, or operator by operator.

Compiled code is kept in a store of the user's own. Results of two engines differ only by rounding.
"""

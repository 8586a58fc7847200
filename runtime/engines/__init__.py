"""Turn functions into callables: compiled by Inductor, or operator by operator.

Compiled code is kept in a store of the user's own. Results do not depend on the engine but for
rounding.
"""

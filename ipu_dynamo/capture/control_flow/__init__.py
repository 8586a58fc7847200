"""Record loops, branches and `vmap`: operators with bodies, which are graphs of their own.

A body reads nothing but what the operator hands it; what it reads of the model is lifted out.
"""

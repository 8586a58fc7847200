"""Lower loops and branches to operators with named bodies, and differentiate them.

A body is a functional graph of its own; what passes do to the model's graph they do to bodies, too.
"""

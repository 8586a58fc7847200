"""Lower loops and branches to operators with named bodies, and differentiate them.

A body is a separate functional graph. Passes rewrite bodies as they rewrite the model's graph.
"""

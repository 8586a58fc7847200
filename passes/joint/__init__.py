"""Rewrite the functional graph of forward and backward.

Every node has a direction and, after `assign_gradient_stages`, a stage; no marker is left.
`Partition` cuts it into one graph per stage and direction.
"""

"""Let models mark what they compute: blocks, the loss, groups, serialised products, transfers.

A mark computes nothing. Its reader among the passes removes it.
"""

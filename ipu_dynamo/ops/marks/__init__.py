"""Let models mark what they compute: blocks, the loss, groups, products, transfers, prints.

A mark computes nothing. Its reader among the passes removes it.
"""

"""Let models mark blocks, the loss, groups, products, transfers and prints.

A mark computes nothing. Its reader among the passes removes it.
"""

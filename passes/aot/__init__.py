"""Carry stages through AOTAutograd, and make a joint graph of what it returns.

What goes in is annotated; what comes out loses tokens, sizes, detach and dead code, and every node
gets its direction and, where it is known, its stage back.
"""

"""Carry stages through AOTAutograd, make a joint graph of what it returns, and cut that in two.

What goes in is annotated; what comes out loses tokens, sizes, detach and dead code, and every node
gets its direction and, where it is known, its stage back. Through torch.compile AOTAutograd asks
for the joint graph to be cut into a forward and a backward one.
"""

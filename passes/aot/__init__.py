"""Carry stages through AOTAutograd, make a joint graph of its result, and cut that in two.

The graph before is annotated. The graph after loses tokens, sizes, detach and dead code. Every node
gets its direction and, if it is known, its stage back. Through torch.compile AOTAutograd asks for
the joint graph to be cut into a forward and a backward one.
"""

"""Save compiled models, and bring them up again in another process, without their modules.

What is loaded goes on as what was saved would have: with the same bits, where machine and versions
match.
"""

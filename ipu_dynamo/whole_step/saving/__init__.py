"""Save compiled models, and bring them up again in another process, without their modules.

A loaded model goes on as the saved one would have: with the same bits, if machine and versions
match.
"""

"""Make every step happen as a whole or not at all, whatever fails or interrupts it.

What an incomplete step has written is undone; signals wait while a step commits.
"""

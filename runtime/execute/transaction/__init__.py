"""Make every step happen as a whole or not at all, whatever fails or interrupts it.

The writes of an incomplete step are undone; signals wait while a step commits.
"""

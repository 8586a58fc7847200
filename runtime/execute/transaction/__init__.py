"""Make every step happen as a whole or not at all, also after failures and interrupts.

The writes of an incomplete step are undone; signals wait while a step commits.
"""

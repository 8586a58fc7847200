"""Ranks: carry values between the processes that share a program.

It knows no executable. `runtime.execute` stands on it.
"""

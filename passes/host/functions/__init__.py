"""Rewrite what the functions of a HostProgram compute, in copies of them.

The program beside them stays as it is. What a function returns, and what is written, stays too.
"""

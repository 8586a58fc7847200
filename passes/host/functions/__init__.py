"""Rewrite the functions of a HostProgram, in copies of them.

The original program stays as it is. A function's results and writes stay, too.
"""

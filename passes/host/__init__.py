"""Rewrite a program for the machine that runs it.

A HostProgram has the program and the functions that run. From `InlineWrites` on these are copies
that write in place.
"""

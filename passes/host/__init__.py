"""Rewrite a program for the machine that runs it.

A HostProgram has the program beside what runs: from `InlineWrites` on functions write, in copies.
"""

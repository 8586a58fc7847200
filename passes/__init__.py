"""Rewrite a traced model to a program, and that for this machine: one rewrite per file.

`pipeline` shows their order. The `invariants` of a level hold after every pass that changed
something. Nothing here runs a program.
"""

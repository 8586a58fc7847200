"""Rewrite a traced model to a program, and that for this machine: one rewrite per file.

`pipeline` shows their order. What `invariants` says of a level holds after every pass that changed
something, and nothing here runs a program.
"""

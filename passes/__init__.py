"""Rewrites from a traced model to a program: one per file, in the order that `pipeline` shows."""

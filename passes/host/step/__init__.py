"""Decide the form of a whole step: micro-batches side by side, one function for all of it, threads.

Each leaves a `Decision` with its reason, which the runtime follows.
"""

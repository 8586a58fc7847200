"""Compile the operators of IPUs into a file, and call that from the saved program.

A file holds text, numbers and tensors. It is found by its checksum, and compiled where it runs.
"""

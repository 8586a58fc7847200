"""Compile what runs on IPUs into a file, call it from the saved program, and run it from there.

A file holds text, numbers and tensors. It is found by its checksum, and compiled where it runs.
"""

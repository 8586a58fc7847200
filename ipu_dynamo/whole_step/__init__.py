"""Compile a whole training step, or inference, as one program: the second front end.

The module's Python is traced once. A CompiledModel holds the program, its executable and the
weights, and follows the torch optimiser. The facade stands on it.
"""

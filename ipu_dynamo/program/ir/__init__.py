"""Define the parts of a program: types, variables, streams, functions, instructions.

Frozen dataclasses, each printed as one line. Equal functions are one, called with other arguments.
"""

"""Find the program of a model compiled before: only passes for the form of a step run again.

The key of a program has everything that decides it. It is taken only for the model that was traced.
"""

"""Find the program of a model compiled before: no pass runs again but for the form of a step.

A program is found by everything that decides it, and taken only for the model that was traced.
"""

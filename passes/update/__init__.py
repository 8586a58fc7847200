"""Rewrite what was recorded of an optimiser's step, up to the functions that a program calls.

`TensorifyScalars` leaves graphs of tensors, `CutUpdate` functions of numbers and of one parameter.
"""

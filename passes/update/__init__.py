"""Rewrite the recorded step of an optimiser into functions that a program calls.

`TensorifyScalars` leaves graphs of tensors, `CutUpdate` functions of numbers and of one parameter.
"""

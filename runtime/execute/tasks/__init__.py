"""Run a program's loop over micro-batches: tasks on registers, alone or by workers.

A task is a stage's work in one direction for one micro-batch, bound to a Python function.
Workers follow the schedule; an error in one stops all.
"""

"""Run what a program does for every micro-batch: tasks on registers, alone or by workers.

A task is what a stage does in one direction for one micro-batch, bound to a Python function.
Workers follow the schedule; an error in one stops all.
"""

"""Describe as data which worker runs which stage pass of which micro-batch, and in which order.

A schedule is printed, drawn, timed, and checked before anything runs by it.
"""

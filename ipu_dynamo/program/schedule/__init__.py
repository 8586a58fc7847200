"""Say which worker runs which stage pass of which micro-batch, in which order: schedules are data.

A schedule is printed, drawn, timed, and checked before anything runs by it.
"""

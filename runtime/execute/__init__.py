"""Run programs: registers, bound calls, workers, roll-back, host inputs and outputs, the timeline.

A step happens as a whole or not at all.
"""

"""Run programs: registers, tasks, workers, roll-back, host inputs and outputs, the timeline.

One interpreter with two entries: `reentrant.py` for compiled graphs, `executable.py` for programs
with variables of their own. A step happens as a whole or not at all. No graph is looked at here.
"""

"""Split a converted program into what the host computes and what IPUs do, and run it.

A partition takes and gives tensors alone: sizes are numbers by then.
"""

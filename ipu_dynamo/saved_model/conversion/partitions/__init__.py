"""Split a converted program into parts for the host and for IPUs, and run them.

A partition takes and gives tensors alone: sizes are numbers by then.
"""

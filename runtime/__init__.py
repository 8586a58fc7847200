"""Run programs: engines make callables of functions, an executable runs the instructions.

What runs, and in which form, host passes have decided: nothing is rewritten here, and only engines
look at graphs.
"""

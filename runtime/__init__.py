"""Run programs: engines make callables of functions, an executable runs the instructions.

Host passes have decided the functions to run and their form. Nothing is rewritten here, and only
engines look at graphs.
"""

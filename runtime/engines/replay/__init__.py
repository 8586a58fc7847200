"""Record the calls of a step, and repeat them without Python.

A recording names memory by numbers: each call brings its own, and no value of one outlives it.
"""

"""Record what a step calls, and repeat it without Python.

A recording names memory by numbers: each call brings its own, and no value of one outlives it.
"""

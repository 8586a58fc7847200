"""Run models: the parts of the executors that `trainingModel` and `inferenceModel` return.

An executor has at most one program; a call traces and compiles if it has none. Code that uses its
device, or the weights there, holds its lock.
"""
